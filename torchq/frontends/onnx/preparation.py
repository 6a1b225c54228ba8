"""Before a file is converted: versions and operators are checked, functions are expanded."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Iterable
from typing import Any

from torchq.errors import FrontendError
from torchq.frontends.onnx.registry import CONVERTERS
from torchq.utils.optional import import_optional

log = logging.getLogger(__name__)

#: The opset versions of ONNX's own operators whose meaning the converters know.
OLDEST, NEWEST = 11, 28
#: How deeply sub-graphs and functions may be nested.
_DEEPEST = 32


def prepare(model: Any, where: str) -> Any:
    """Return a model of nothing but operators that can be converted.

    Args:
        model: an ``onnx.ModelProto``.
        where: how errors begin.

    Raises:
        FrontendError: the opset is too old or too new, sub-graphs are nested too deeply, or
            operators have neither a converter nor a definition by others; the text names all.
    """
    _check_names(model.graph, where)
    version = opset_versions(model).get("", OLDEST)
    if version > NEWEST:
        raise FrontendError(
            f"{where}: got opset {version}; expected at most {NEWEST}. Export for an older opset"
        )
    if version < OLDEST:
        model = _upgraded(model, where, version)
    for _ in range(_DEEPEST):
        expanded = _expand_functions(model, where)
        if expanded is None:
            break
        model = expanded
    _check_operators(model, where)
    return model


def _upgraded(model: Any, where: str, version: int) -> Any:
    """Return a model of an old opset in the oldest one that converters know."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    slopes = [node.input[1] for node in model.graph.node if node.op_type == "PRelu"]
    if version < 7 and any(sizes.get(name) != 1 for name in slopes):
        raise FrontendError(
            f"{where}: got opset {version}, where a PRelu has a slope of each channel; "
            f"expected opset 7 or newer"
        )
    try:
        converter = import_optional("onnx.version_converter", "from_onnx")
        return converter.convert_version(model, OLDEST)
    except Exception as error:  # the binding raises several kinds
        raise FrontendError(
            f"{where}: got opset {version}, which onnx.version_converter cannot bring to {OLDEST} "
            f"({type(error).__name__}: {error}). Export for opset {OLDEST} or newer"
        ) from error


def _check_names(graph: Any, where: str) -> None:
    """Refuse names that are no text: protobuf gives bytes that are not UTF-8 as they are."""
    tensors = [*graph.initializer, *graph.input, *graph.output]
    names = [graph.name, *(tensor.name for tensor in tensors)]
    for node in graph.node:
        names += [node.name, node.op_type, node.domain, *node.input, *node.output]
        names += [attribute.name for attribute in node.attribute]
    broken = next((name for name in names if not isinstance(name, str)), None)
    if broken is not None:
        raise FrontendError(f"{where}: got the name {broken!r}; expected names in UTF-8")


def opset_versions(model: Any) -> dict[str, int]:
    """Return the version of each domain; that of ONNX's own operators is ``""``."""
    return {domain_of(entry): entry.version for entry in model.opset_import}


def domain_of(message: Any) -> str:
    """Return the domain of a node or of an opset, ``""`` for ONNX's own."""
    return "" if message.domain == "ai.onnx" else str(message.domain)


def _expand_functions(model: Any, where: str) -> Any:
    """Replace operators without a converter by the functions that define them, None for nothing."""
    versions, found = opset_versions(model), set()
    for domain, op_type in _operators(model.graph, where):
        is_known = (domain, op_type) in CONVERTERS or domain not in ("", "ai.onnx.ml")
        if not is_known and _is_function(domain, op_type, versions.get(domain, 1)):
            found.add((domain, op_type))
    if not found:
        return None
    for node in model.graph.node:
        if (domain_of(node), node.op_type) in found:
            _write_defaults(node, versions)
    inliner = import_optional("onnx.inliner", "from_onnx")
    try:
        result = inliner.inline_selected_functions(
            model, sorted(found), inline_schema_functions=True
        )
    except Exception as error:  # the binding raises several kinds
        log.debug("%s: %s: %s", where, type(error).__name__, error)
        return None
    same = _operators(result.graph, where) == _operators(model.graph, where)
    return None if same else result


def _write_defaults(node: Any, versions: dict[str, int]) -> None:
    """Write the attributes that a node leaves out, which the inliner would leave out as well."""
    defs = import_optional("onnx", "from_onnx").defs
    schema = defs.get_schema(node.op_type, versions.get(node.domain, 1), node.domain)
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            node.attribute.append(attribute.default_value)


def _is_function(domain: str, op_type: str, version: int) -> bool:
    """Return True if the standard defines an operator by others."""
    try:
        schema = import_optional("onnx", "from_onnx").defs.get_schema(op_type, version, domain)
    except Exception:  # the binding raises several kinds for operators that the standard lacks
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _check_operators(model: Any, where: str) -> None:
    counts = _operators(model.graph, where)
    unknown = {key: count for key, count in counts.items() if key not in CONVERTERS}
    if unknown:
        text = ", ".join(
            f"{domain + '.' if domain else ''}{op_type} ({count})"
            for (domain, op_type), count in sorted(unknown.items())
        )
        raise FrontendError(f"{where}: no converter for {text}. {_advice(unknown)}")


def _advice(unknown: Iterable[tuple[str, str]]) -> str:
    """Return how to do without operators that have no converter."""
    if any(op_type.startswith("QLinear") or op_type == "QGemm" for _, op_type in unknown):
        return "Quantize the float file again with quant_format=QuantFormat.QDQ"
    if any(domain == "com.microsoft" for domain, _ in unknown):
        return "Read the file from before ONNX Runtime optimized it"
    return "Write one with torchq.frontends.onnx.converter, or cut the graph before them"


def _operators(graph: Any, where: str, depth: int = 0) -> collections.Counter[tuple[str, str]]:
    """Count the operators of a graph and of its sub-graphs."""
    if depth > _DEEPEST:
        raise FrontendError(f"{where}: sub-graphs are nested more than {_DEEPEST} deep")
    result: collections.Counter[tuple[str, str]] = collections.Counter()
    for node in graph.node:
        result[domain_of(node), node.op_type] += 1
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                _check_names(attribute.g, where)
                result += _operators(attribute.g, where, depth + 1)
    return result


def count_readers(graph: Any) -> collections.Counter[str]:
    """Count how often each tensor is read, by nodes, sub-graphs and outputs."""
    result = collections.Counter(output.name for output in graph.output)
    for node in graph.node:
        result.update(node.input)
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                result += count_readers(attribute.g)
    return result
