"""The graph that a file is converted into, and one node of a file as converters see it."""

import abc
import itertools
import keyword
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, NoReturn, TypeVar, Union

import torch
from torch import Tensor, fx, nn

from torchq.errors import FrontendError
from torchq.frontends.building.one_call import is_one_call, one_call
from torchq.utils import Registry


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that is known at conversion."""

    tensor: Tensor  # never changed in place
    name: str = ""  # of the tensor in the file, "" for a computed one
    origin: str = (
        ""  # the tensor of the file that this one was made from, which names modules
    )
    trainable: bool = (
        False  # nodes that read the tensor itself read a parameter, not a buffer
    )


@dataclass(frozen=True)
class Ints:
    """A tensor of whole numbers that is computed from shapes, kept as its elements.

    So a dynamic size stays symbolic through chains such as Shape, Gather, Concat, Reshape. The type
    is bool for comparisons of sizes, float32 or float64 for sizes that were cast and nothing else.
    """

    # Numbers, and nodes that compute one number or flag.
    items: tuple[int | fx.Node, ...]
    scalar: bool = False  # a tensor without dimensions, not a vector
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True, eq=False)
class Items:
    """A sequence of tensors, whose number is known."""

    values: tuple["Value", ...]


#: A node computes a tensor in every call. None is an optional input or output that is left out.
Value = Union[fx.Node, Constant, Ints, Items, None]


@one_call
def stack_ints(
    items: Sequence[int], scalar: bool, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return sizes as one tensor: a vector, or a number without dimensions."""
    return torch.tensor(items[0] if scalar else list(items), dtype=dtype)


_DEEPEST = 32


def identifier(name: str, *, digits: bool = False) -> str:
    """Return ``name`` as a Python identifier: generated code contains nothing else of a file."""
    clean = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
    if clean.isdigit() and digits:
        return clean
    if clean[0].isdigit():
        clean = f"_{clean}"
    return (
        f"{clean}_" if keyword.iskeyword(clean) or hasattr(nn.Module, clean) else clean
    )


def free_path(root: nn.Module, name: str, op_type: str = "") -> str:
    """Return a free path below ``root`` for a name whose steps dots and slashes separate."""
    parts = [identifier(part, digits=True) for part in re.split(r"[./]+", name) if part]
    if op_type and len(parts) > 1 and re.fullmatch(rf"{op_type}(_\d+)?", parts[-1]):
        parts.pop()
    parts = parts[-_DEEPEST:] or ["node"]
    if _is_free(root, parts):
        return ".".join(parts)
    flat = "_".join(parts)
    return _first_free(
        f"_{flat}" if flat[0].isdigit() else flat, 1, lambda n: _is_free(root, [n])
    )


def _first_free(name: str, start: int, is_free: Callable[[str], bool]) -> str:
    """Return a name, or the first free one of those with a number behind it."""
    numbered = (f"{name}_{number}" for number in itertools.count(start))
    return name if is_free(name) else next(filter(is_free, numbered))


def _is_free(root: nn.Module, parts: list[str]) -> bool:
    """Return True if something may be put at a path: every step before it is a plain container."""
    parent = root
    for part in parts[:-1]:
        if not hasattr(parent, part):
            return True
        child = dict(parent.named_children()).get(part)
        if type(child) is not nn.Module:
            return False
        parent = child
    return not hasattr(parent, parts[-1])


def parent_of(root: nn.Module, path: str) -> nn.Module:
    """Return the module that the last step of a path belongs to; missing containers are made."""
    parent = root
    for part in path.split(".")[:-1]:
        if part not in dict(parent.named_children()):
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    return parent


F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """A converter, and what its format has to know of the operator beside."""

    convert: Callable[[Any], object]
    about: Any = None


class Converters(Registry[str, Entry]):
    """From the operators of a format to their converters."""

    def converter(self, *kinds: str, about: object = None) -> Callable[[F], F]:
        """Enter the decorated function as the converter of operators that have none yet."""

        def enter(function: F) -> F:
            for kind in kinds:
                self.add(kind, Entry(function, about))
            return function

        return enter

    def row(
        self,
        kinds: str,
        function: Callable[..., object],
        *,
        about: object = None,
        **attributes: object,
    ) -> None:
        """Enter operators, with spaces between them, that one function or class computes.

        A function takes all inputs and then the attributes, which come in order and with defaults
        as for :meth:`FileNode.attr`; a module is made with the attributes and takes the inputs.
        """

        @self.converter(*kinds.split(), about=about)
        def convert(node: FileNode) -> Value:
            numbers = [node.attr(name, default) for name, default in attributes.items()]
            if isinstance(function, type):
                return node.module(function(*numbers), *node.inputs)
            return node.call(function, *node.inputs, *numbers)


#: The key of ``GraphModule.meta`` under which torch looks for attributes that a copy shall have.
_KEPT_BY_COPIES = "_user_preserved_attributes"


class GraphBuilder:
    """What has been converted so far."""

    #: The sizes that a file states bind, so that other inputs are an error.
    checks_sizes = False

    def __init__(self, where: str) -> None:
        self.where = where
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.values: dict[Any, Value] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._tensors: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []

    def input(self, name: str) -> fx.Node:
        """Return a new argument of ``forward``, named after an input of the file."""
        used_names = {
            "self",
            *(str(n.target) for n in self.graph.nodes if n.op == "placeholder"),
        }
        return self.graph.placeholder(
            _first_free(identifier(name), 2, lambda n: n not in used_names)
        )

    def parameter(
        self, value: Constant, key: str = "", tensor: Tensor | None = None
    ) -> nn.Parameter:
        """Return a parameter with the values of a constant, the same one for the same name."""
        tensor = (value.tensor if tensor is None else tensor).contiguous()
        parameter = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        return (
            self.parameters.setdefault(f"{value.name}\0{key}", parameter)
            if value.name
            else parameter
        )

    def stored(self, value: Constant) -> fx.Node:
        """Return a node that gives a constant: a parameter of the result, or a buffer."""
        stored_name = self._tensors.get(id(value.tensor))
        if stored_name is not None:
            return stored_name
        # A slash separates parts of what belongs to one node, whose path a module may take later.
        name = value.name.replace(".", "_") if "/" in value.name else value.name
        path = free_path(self.root, name.replace("/", "_") or "constant")
        parent = parent_of(self.root, path)
        leaf = path.rpartition(".")[2]
        if value.trainable and value.tensor.is_floating_point():
            parent.register_parameter(leaf, self.parameter(value))
        else:
            # Exporters ask for the memory that the shape says, not one element for all.
            parent.register_buffer(leaf, value.tensor.contiguous())
        first = next(
            (node for node in self.graph.nodes if node.op != "placeholder"), None
        )
        if first is None:
            node = self.graph.get_attr(path)
        else:
            with self.graph.inserting_before(first):
                node = self.graph.get_attr(path)
        self._tensors[id(value.tensor)] = node
        self._kept.append(value.tensor)  # ids stay unique while tensors live
        return node

    def add_module(self, name: str, module: nn.Module, op_type: str) -> str:
        """Put a module into the result under a path made from ``name``; return the path."""
        path = free_path(self.root, name, op_type)
        parent_of(self.root, path).add_module(path.rpartition(".")[2], module)
        return path

    def finish(
        self,
        outputs: Sequence[fx.Node],
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        input_shapes: Sequence[Sequence[int | None] | None],
    ) -> fx.GraphModule:
        """Return the result, in eval mode, without what no output needs."""
        self.graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        name = identifier(name)
        draft = fx.GraphModule(self.root, self.graph, class_name=name)
        draft.graph.eliminate_dead_code()
        draft.graph.lint()
        # Keeps what the graph uses.
        module = fx.GraphModule(draft, draft.graph, class_name=name)
        facts = {
            "input_names": list(input_names),
            "input_shapes": list(input_shapes),
            "output_names": list(output_names),
            "checks_sizes": self.checks_sizes,
        }
        vars(module).update(facts)
        module.meta[_KEPT_BY_COPIES] = facts
        return module.eval()


#: The largest constant, in elements, that is computed while a file is converted.
MAX_FOLDED = 2**26


class Attributes(abc.ABC):
    """What a file says of a node, read one by one."""

    #: Attributes that say how a framework computes or trains, not what a network computes.
    ignored: ClassVar[re.Pattern[str]] = re.compile(r"\w*")
    noun: ClassVar[str] = "attributes"  # in errors

    def __init__(self, given: dict[str, Any]) -> None:
        self.attributes = given
        self.seen = set[str]()

    def check_all_read(self) -> None:
        """Refuse attributes that the converter did not read, which may change the result."""
        unread = [name for name in self.attributes if name not in self.seen]
        unknown = sorted(name for name in unread if not self.ignored.fullmatch(name))
        if unknown:
            self.refuse(
                f"got the {self.noun} {', '.join(unknown)}, which are not supported"
            )

    def attr(self, name: str, default: object = None) -> Any:
        """Return an attribute in the type of ``default``, or ``default`` where it is left out.

        A type in place of a default means that the format requires the attribute; one such as
        ``int | None`` gives None where it is left out.
        """
        kind = default if isinstance(default, type) else type(default)
        if isinstance(default, UnionType):
            kind, default = default.__args__[0], None
        found = self.read(name, kind)
        if found is None and default is kind:
            self.refuse(f"the attribute {name!r} is missing")
        return default if found is None else found

    @abc.abstractmethod
    def read(self, name: str, kind: type) -> Any:
        """Return an attribute in a type, None where it is left out."""

    @abc.abstractmethod
    def refuse(self, reason: str) -> NoReturn:
        """Raise the error that this node cannot be converted."""


class FileNode(Attributes):
    """One node: its inputs, its attributes, and the calls that a converter writes in its place."""

    format: ClassVar[str] = "file"

    def __init__(
        self,
        builder: GraphBuilder,
        op_type: str,
        name: str,
        attributes: dict[str, Any],
        inputs: list[Value],
    ) -> None:
        super().__init__(attributes)
        self.builder, self.inputs = builder, inputs
        self.op_type, self.name = op_type, name

    def read(self, name: str, kind: type) -> Any:
        """Return an attribute in a type; here the file has types of its own."""
        value = self.attributes.get(name)
        return (
            kind(value)
            if kind in (bool, int, float, list) and value is not None
            else value
        )

    def converted(self, convert: Callable[[Any], Any]) -> list[Value]:
        """Return what a converter makes of this node; errors of a damaged file name the node."""
        try:
            result = convert(self)
            self.check_all_read()
        except FrontendError:
            raise
        except Exception as error:  # a file may hold any attribute and any constant
            raise FrontendError(
                f"{self.builder.where}: {self.op_type} {self.name!r} cannot be converted "
                f"({type(error).__name__}: {error})"
            ) from error
        return list(result) if isinstance(result, (list, tuple)) else [result]

    def input(self, index: int) -> Value:
        """Return an input, None where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error that this node cannot be converted."""
        raise FrontendError(
            f"{self.builder.where}: {self.op_type} {self.name!r}: {reason}"
        )

    def constant(self, index: int) -> Tensor | None:
        """Return an input that is known now, else None."""
        value = self.input(index)
        return value.tensor if isinstance(value, Constant) else None

    def known(self, index: int, what: str) -> Tensor:
        """Return an input that must be known now."""
        tensor = self.constant(index)
        if tensor is None:
            self.refuse(f"its {what} is computed by the network; expected a constant")
        return tensor

    # What converters write.

    def call(
        self, function: Callable[..., object], *args: object, **kwargs: object
    ) -> Value:
        """Call ``function`` in the forward of the result; at once where all arguments are known.

        The function takes tensors for known values; it must be importable by its name.
        """
        if not _has_nodes((args, kwargs)):
            return self._folded(function, args, kwargs)
        args, kwargs = self._as_arguments(args), self._as_arguments(kwargs)
        return self.function_node(function, tuple(args), dict(kwargs))

    def call_parts(
        self, count: int, function: Callable[..., object], *args: object
    ) -> list[Value]:
        """Call a function that returns ``count`` tensors."""
        return self.parts(count, self.call(function, *args))

    def parts(self, count: int, result: Any) -> list[Value]:
        """Return the ``count`` tensors that a call gave as a tuple."""
        if isinstance(result, fx.Node):
            return [
                self.call(operator.getitem, result, index) for index in range(count)
            ]
        return list(result)  # a tuple of constants

    def module(self, module: nn.Module, *args: Value, name: str | None = None) -> Value:
        """Call a module of the result; at once where all arguments are known."""
        module.eval()
        if not _has_nodes(args):
            return self._folded(module, args, {})
        path = self.builder.add_module(name or self.name, module, self.op_type)
        node = self.builder.graph.call_module(path, tuple(self._as_arguments(args)))
        return self.noted(node)

    def tensor(self, value: Value) -> fx.Node:
        """Return a node that gives ``value``: constants become tensors of the result."""
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, Constant):
            return self.builder.stored(value)
        if not isinstance(value, Ints):
            self.refuse("it reads a sequence; expected a tensor")
        arguments: tuple[Any, ...] = (list(value.items), value.scalar)
        if value.dtype is not torch.int64:
            arguments = (*arguments, value.dtype)
        return self.function_node(stack_ints, arguments)

    def function_node(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """Add a call of a function of torch, or of one that is decorated with ``one_call``."""
        is_ours = getattr(function, "__module__", "").startswith("torchq.")
        if is_ours and not is_one_call(function):
            raise TypeError(
                f"{function.__module__}.{function.__qualname__}: got a function that torch.fx "
                "would look into when it traces the result; expected one decorated with "
                "torchq.frontends.building.one_call"
            )
        return self.noted(self.builder.graph.call_function(function, args, kwargs))

    def noted(self, node: fx.Node) -> fx.Node:
        """Note in a node of the graph which node of the file it belongs to."""
        node.meta[f"{self.format}_name"] = self.name
        node.meta[f"{self.format}_op"] = self.op_type
        return node

    def _folded(
        self, function: Callable[..., Any], args: Sequence[object], kwargs: Any
    ) -> Value:
        with torch.no_grad():
            args, kwargs = _nested(
                (args, kwargs), lambda value: getattr(value, "tensor", value)
            )
            result = function(*args, **kwargs)
        if isinstance(result, (tuple, list)):
            return tuple(Constant(part) for part in result)  # type: ignore[return-value]
        if result.numel() > MAX_FOLDED and math.prod(result.stride() or (1,)):
            self.refuse(
                f"it makes a constant of {tuple(result.shape)}; "
                f"expected one of at most {MAX_FOLDED} elements"
            )
        return Constant(result)

    def _as_arguments(self, arguments: object) -> Any:
        constant_types = (Constant, Ints, Items)
        return _nested(
            arguments, lambda v: self.tensor(v) if isinstance(v, constant_types) else v
        )


def _nested(arguments: object, function: Callable[[Any], object]) -> Any:
    """Apply a function to what dictionaries, lists and tuples hold."""
    if isinstance(arguments, dict):
        return {key: _nested(item, function) for key, item in arguments.items()}
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_nested(item, function) for item in arguments)
    return function(arguments)


def _has_nodes(arguments: object) -> bool:
    nodes: list[Any] = []
    _nested(arguments, nodes.append)
    return any(isinstance(value, (fx.Node, Ints, Items)) for value in nodes)
