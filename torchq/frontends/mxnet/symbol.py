"""The network of a symbol file, in the dialects of all versions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from torchq.errors import ConfigError, FrontendError
from torchq.frontends.building.importer import Output, text_of
from torchq.utils import parse_json, short_repr

_VARIABLE = "null"


@dataclass(frozen=True)
class SymbolNode:
    """One node of a symbol."""

    op: str
    name: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[tuple[int, int], ...] = ()

    @property
    def is_variable(self) -> bool:
        """Return True for an input or a parameter."""
        return self.op == _VARIABLE


@dataclass(frozen=True)
class Symbol:
    """A network."""

    nodes: tuple[SymbolNode, ...]
    heads: tuple[tuple[int, int], ...]


def read_symbol(source: object, where: str) -> Symbol:
    """Read a symbol."""
    try:
        data = parse_json(text_of(source, where, "symbol"), where)
    except ConfigError as error:
        raise FrontendError(str(error)) from None
    if not isinstance(data, dict) or not isinstance(data.get("nodes"), list):
        raise FrontendError(
            f"{where}: got no list of nodes; expected the JSON text of a symbol"
        )
    nodes = [_node(entry, number, where) for number, entry in enumerate(data["nodes"])]
    heads = _entries(data.get("heads"), len(nodes), f"{where}: heads")
    if not heads:
        raise FrontendError(f"{where}: got a symbol without heads; expected an output")
    return Symbol(tuple(_with_hidden_states(nodes)), heads)


def _node(entry: object, number: int, where: str) -> SymbolNode:
    where = f"{where}: node {number}"
    if not isinstance(entry, dict):
        raise FrontendError(f"{where}: got {short_repr(entry)}; expected a JSON object")
    op = entry.get("op")
    name = entry.get("name")
    if not isinstance(op, str) or not isinstance(name, str):
        raise FrontendError(
            f"{where}: got {short_repr(entry)}; expected 'op' and 'name' as text"
        )
    if entry.get("subgraphs"):
        raise FrontendError(
            f"{where}: {op} {name!r} holds a graph, which is not supported"
        )
    attributes: dict[str, str] = {}
    for key in ("attr", "attrs", "param"):
        part = entry.get(key) or {}
        if not isinstance(part, dict):
            raise FrontendError(
                f"{where}: got {short_repr(part)} as {key!r}; expected an object"
            )
        attributes |= {
            str(k): v if isinstance(v, str) else str(v) for k, v in part.items()
        }
    inputs = _entries(entry.get("inputs", []), number, f"{where}: inputs")
    return SymbolNode(op, name, attributes, inputs)


def _entries(value: object, count: int, where: str) -> tuple[tuple[int, int], ...]:
    """Return references to outputs of the first ``count`` nodes."""
    if not isinstance(value, list):
        raise FrontendError(f"{where}: got {short_repr(value)}; expected a list")
    result = []
    for entry in value:
        good = isinstance(entry, list) and 1 < len(entry) < 4
        if not good or not all(type(item) is int and item >= 0 for item in entry[:2]):
            raise FrontendError(
                f"{where}: got {short_repr(entry)}; expected [node, output]"
            )
        if entry[0] >= count:
            raise FrontendError(
                f"{where}: got node {entry[0]}; expected one of the {count} nodes before"
            )
        result.append((entry[0], entry[1]))
    return tuple(result)


def _with_hidden_states(nodes: list[SymbolNode]) -> list[SymbolNode]:
    """Append the variables of BatchNorm's statistics, which files up to version 0.8 leave out."""
    result = list(nodes)
    for number, node in enumerate(nodes):
        if node.op == "BatchNorm" and len(node.inputs) == 3:
            states = ((len(result), 0), (len(result) + 1, 0))
            result[number] = replace(node, inputs=node.inputs + states)
            names = (node.name + suffix for suffix in ("_moving_mean", "_moving_var"))
            result += [SymbolNode(_VARIABLE, name) for name in names]
    return result


#: Operators whose first output may have other dimensions than their first input.
_CHANGES = re.compile(
    r"reshape|flatten|fullyconnected|expand_dims|squeeze|stack|slicechannel|"
    r"_?split\w*|embedding|take"
    r"|(batch_)?dot|(sum|max|min)(_axis)?|mean|norm|arg(max|min)|where|tile|repeat|broadcast_\w+"
)
#: Operators whose inputs and first output have equally many dimensions.
_KEEPS_ALL = re.compile(
    r"_(plus|minus|mul|div|add|sub)|elemwise_(add|sub|mul|div)|add_n|elementwisesum|concat"
)
#: Operators whose attribute ``kernel`` tells the number of dimensions.
_WINDOWED = frozenset(
    {"Convolution", "Convolution_v1", "Deconvolution", "Pooling", "Pooling_v1"}
)
#: Operators on images.
_IMAGES = frozenset(
    {
        "Crop",
        "LRN",
        "UpSampling",
        "_contrib_AdaptiveAvgPooling2D",
        "_contrib_BilinearResize2D",
    }
)


def infer_ndims(symbol: Symbol, params: Mapping[str, Tensor]) -> dict[Output, int]:
    """Return the number of dimensions of each output of a node that is known."""
    ranks: dict[Output, int] = {}
    for number, node in enumerate(symbol.nodes):
        stated = _length(node.attributes.get("__shape__", ""))
        if node.is_variable and node.name in params:
            ranks[number, 0] = params[node.name].dim()
        elif node.is_variable and stated:
            ranks[number, 0] = stated
    operators = [
        (n, node) for n, node in enumerate(symbol.nodes) if not node.is_variable
    ]
    # Each round carries numbers through the whole network, in both directions.
    for _ in range(4):
        before = len(ranks)
        for number, node in (*operators, *reversed(operators)):
            _spread(ranks, number, node)
        if len(ranks) == before:
            break
    return ranks


def _length(text: str) -> int:
    """Return how many items a tuple has in its text, 0 if that is not known."""
    return len([item for item in text.strip("()[] ").split(",") if item.strip()])


def _spread(known: dict[Output, int], number: int, node: SymbolNode) -> None:
    """Carry numbers between the inputs and the outputs of one operator."""
    result = (number, 0)
    inputs = node.inputs
    equal = [result, *(inputs if _KEEPS_ALL.fullmatch(node.op.lower()) else inputs[:1])]
    if _CHANGES.fullmatch(node.op.lower()):
        equal = []
    rank = next((known[output] for output in equal if output in known), None)
    if node.op in _WINDOWED and rank is None:
        spatial = _length(node.attributes.get("kernel", ""))
        rank = spatial + 2 if spatial else None
    elif node.op in _IMAGES:
        rank = 4
    for output in equal if rank is not None else ():
        known.setdefault(output, rank)  # type: ignore[arg-type]
    size = _size_of_result(known, node)
    if size is not None:
        known.setdefault(result, size)


def _size_of_result(known: dict[Output, int], node: SymbolNode) -> int | None:
    """Return the number of dimensions of a result that differs from that of the input."""
    first = known.get(node.inputs[0]) if node.inputs else None
    if node.op in ("Flatten", "flatten"):
        return 2
    if node.op == "FullyConnected":
        flat = node.attributes.get("flatten", "True") in ("True", "true", "1")
        return 2 if flat else first
    if node.op in ("Reshape", "reshape"):
        shape_text = node.attributes.get("shape", "")
        codes = [
            item.strip(" L")
            for item in shape_text.strip("()[] ").split(",")
            if item.strip()
        ]
        return len(codes) if codes and not {"-2", "-3", "-4"} & set(codes) else None
    if node.op == "expand_dims":
        return None if first is None else first + 1
    if node.op.startswith("broadcast_"):
        ndims = [known.get(source) for source in node.inputs]
        return None if None in ndims else max(ndims, default=None)  # type: ignore[type-var]
    return None
