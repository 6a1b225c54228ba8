"""The operators of torch, one row each, and what nodes do besides returning a value.

A row says how an operator is spelled, what it does to values, and what stands for it in a
quantized model. Tracing, routing, placement, export and lowering read these rows, so a new
operator that a runtime quantizes is one row, with a module in :mod:`torchq.nn.modules.operators`
if no module there computes it. Rows name modules of torchq as text: this package knows none.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from torchq.utils import Registry

#: Position and keyword of an argument.
Place: TypeAlias = tuple[int, str]
#: Takes the arguments of a call and returns the values that it computes with; None where the call
#: has another form, such as an addition with ``alpha``.
Operands: TypeAlias = Callable[
    [tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...] | None
]


# --- kinds of layers ----------------------------------------------------------------------------

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: Layers whose results have their output channels along one axis of the weight, the first one.
LAYERS = (*CONVOLUTIONS, nn.Linear)
#: Norms with running statistics, which may be folded into the layer in front of them.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
#: Pools that take the largest element of a window, or the mean.
POOLS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)

# --- operators ----------------------------------------------------------------------------------


def _first(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, ...] | None:
    return args[:1] or None


def _resized(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, ...] | None:
    """Return the operand of a resizing whose weights are not negative."""
    mode = args[3] if len(args) > 3 else kwargs.get("mode", "nearest")
    return args[:1] if mode != "bicubic" else None


def _two(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, ...] | None:
    return args if len(args) == 2 and not kwargs else None


def _three(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, ...] | None:
    return args[:3] if len(args) > 2 else None


def _listed(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, ...] | None:
    if not args or kwargs.keys() - {"dim"}:
        return None
    return tuple(args[0]) if isinstance(args[0], (list, tuple)) else args[:1]


def _pooled(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, ...] | None:
    """Return the operand of a mean over several dimensions, which is global pooling."""
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    return args[:1] if isinstance(dims, (tuple, list)) and len(dims) > 1 else None


def _padded(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, ...] | None:
    """Return the operand of a padding, and the constant that it adds."""
    value = args[3] if len(args) > 3 else kwargs.get("value")
    return (*args[:1], 0.0 if value is None else value)


@dataclass(frozen=True)
class Operator:
    """One operator: how it is spelled, what it does to values, and what stands for it.

    Attributes:
        name: what it is called, the same for its function, its method and its module.
        functions: the functions that compute it.
        methods: the methods of a tensor that do.
        kind: the word for it in :attr:`torchq.runtime.Placement.operators` and in records, where
            that names several operators.
        syntax: the class of :mod:`ast` for its sign in code.
        classes: the modules of torch that compute it.
        effects: what it does to values. ``"move"``: rearranges the elements of its first argument,
            so that it gives codes for codes. ``"max"``: gives the largest element of each window.
            ``"clip"``: clips single values, which a quantizer behind it can include. ``"part"``:
            returns parts of its argument. ``"view"``: may return memory of its argument.
            ``"metadata"``: reads what a tensor is like, and no element; ``"shape"``: its shape
            alone. ``"product"``: multiplies by weights in forms that have no quantized one.
            ``"like"``: reads no element of its first argument; ``"as"``: of any other one.
        nonnegative: ``"always"``: no result is negative; ``"kept"``: none is where no operand is.
        module: the class of torchq that stands for it where its operands are quantized.
        operands: what it computes with.
        layer: the class whose rules apply where one operand is a weight.
        left, right: the two operands of such a product; the right one is the weight.
        symmetric: the left one may be the weight too.
        outputs: the axis of the output channels of the weight: ``"first"``, ``"last"`` or
            ``"any"``.
    """

    name: str
    functions: tuple[Any, ...] = ()
    methods: tuple[str, ...] = ()
    kind: str = ""
    syntax: str = ""
    classes: tuple[type[nn.Module], ...] = ()
    effects: frozenset[str] = frozenset()
    nonnegative: Literal["", "kept", "always"] = ""
    module: str = ""
    operands: Operands = _first
    layer: str = ""
    left: Place = (0, "input")
    right: Place = (1, "weight")
    symmetric: bool = False
    outputs: Literal["first", "last", "any"] = "first"

    @property
    def word(self) -> str:
        """The kind, or else the name."""
        return self.kind or self.name


def _row(name: str, *spellings: object, effects: str = "", **fields: Any) -> Operator:
    """Return a row; spellings are functions, and methods as text."""
    methods = tuple(s for s in spellings if isinstance(s, str))
    functions = tuple(s for s in spellings if not isinstance(s, str))
    return Operator(
        name, functions, methods, effects=frozenset(effects.split()), **fields
    )


def _rows(names: str, effects: str) -> Iterator[Operator]:
    """Yield a row for each name of a function or method with these effects."""
    for name in names.split():
        candidates = [getattr(home, name, None) for home in (torch, F, operator)]
        functions = [
            f
            for f in dict.fromkeys(candidates)
            if callable(f) and not isinstance(f, type)
        ]
        yield _row(name, name, *functions, effects=effects)


def _pools() -> Iterator[Operator]:
    tap: dict[str, Any] = {"kind": "pool", "module": "Tap", "nonnegative": "kept"}
    for d in "123":
        for kind, title in (
            ("max", "Max"),
            ("avg", "Avg"),
            ("adaptive_avg", "AdaptiveAvg"),
        ):
            name = f"{kind}_pool{d}d"
            effects = "max" if kind == "max" else ""
            classes = (getattr(nn, f"{title}Pool{d}d"),)
            # Those of torch alone are called where a function of torch is looked into.
            inner = [
                getattr(torch, n) for n in (name,) if n in ("max_pool2d", "avg_pool1d")
            ]
            yield _row(
                name, getattr(F, name), *inner, effects=effects, classes=classes, **tap
            )
        pool = getattr(nn, f"AdaptiveMaxPool{d}d")
        yield _row(f"adaptive_max_pool{d}d", nonnegative="kept", classes=(pool,))
    yield _row("mean", torch.mean, "mean", operands=_pooled, **tap)


def _layers() -> Iterator[Operator]:
    """Yield the products of layers, whose weight is their second argument."""
    yield _row("linear", F.linear, layer="Linear", classes=(nn.Linear,))
    for name, title in (("conv", "Conv"), ("conv_transpose", "ConvTranspose")):
        for d in "123":
            layer = f"{title}{d}d"
            classes = (getattr(nn, layer),)
            yield _row(
                f"{name}{d}d", getattr(F, f"{name}{d}d"), layer=layer, classes=classes
            )


def _products() -> Iterator[Operator]:
    """Yield the products of matrices, in which either operand may be a weight."""
    shared: dict[str, Any] = {"layer": "Linear", "symmetric": True, "outputs": "last"}
    matmul: dict[str, Any] = {
        **shared,
        "kind": "matmul",
        "module": "MatMul",
        "operands": _two,
    }
    yield _row(
        "matmul",
        *(operator.matmul, operator.imatmul, torch.matmul, "matmul"),
        syntax="MatMult",
        right=(1, "other"),
        **matmul,
    )
    yield _row("bmm", torch.bmm, "bmm", right=(1, "mat2"), **matmul)
    yield _row("mm", torch.mm, "mm", kind="matmul", right=(1, "mat2"), **shared)
    places: dict[str, Any] = {"left": (1, "mat1"), "right": (2, "mat2")}
    yield _row("addmm", torch.addmm, "addmm", **places, **shared)
    places = {"left": (1, "batch1"), "right": (2, "batch2"), "kind": "addmm"}
    yield _row("baddbmm", torch.baddbmm, "baddbmm", **places, **shared)
    # In these any axis may be summed over.
    shared["outputs"] = "any"
    places = {"left": (1, "operands"), "right": (2, "operands"), "effects": "product"}
    yield _row("einsum", torch.einsum, **places, **shared)
    yield _row("tensordot", torch.tensordot, left=(0, "a"), right=(1, "b"), **shared)
    # These are reported where one operand is a weight, and stay float.
    yield from _rows("bilinear mv addmv addbmm inner convolution conv_tbc", "product")
    yield _row("multi_dot", torch.linalg.multi_dot, effects="product")


def _activations() -> Iterator[Operator]:
    tap: dict[str, Any] = {"kind": "activation", "module": "Tap"}
    yield _row("silu", F.silu, classes=(nn.SiLU,), **tap)
    yield _row("hardswish", F.hardswish, classes=(nn.Hardswish,), **tap)
    yield _row("leaky_relu", F.leaky_relu, classes=(nn.LeakyReLU,), **tap)
    yield _row("elu", F.elu, classes=(nn.ELU,), **tap)
    yield _row("mish", F.mish, classes=(nn.Mish,), **tap)
    tap["nonnegative"] = "always"
    yield _row("hardsigmoid", F.hardsigmoid, classes=(nn.Hardsigmoid,), **tap)
    yield _row(
        "sigmoid", F.sigmoid, torch.sigmoid, "sigmoid", classes=(nn.Sigmoid,), **tap
    )
    softmax = (F.softmax, torch.softmax, "softmax")
    yield _row("softmax", *softmax, nonnegative="always", classes=(nn.Softmax,))
    for name in ("abs", "exp"):
        yield _row(name, getattr(torch, name), name, nonnegative="always")


def _clips() -> Iterator[Operator]:
    relu = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
    yield _row("relu", *relu, effects="clip", nonnegative="always", classes=(nn.ReLU,))
    yield _row(
        "relu6", F.relu6, effects="clip", nonnegative="always", classes=(nn.ReLU6,)
    )
    yield _row("clamp", torch.clamp, torch.clamp_, "clamp", "clamp_", effects="clip")
    yield _row("clip", torch.clip, torch.clip_, "clip", "clip_", effects="clip")
    yield _row(
        "hardtanh", F.hardtanh, F.hardtanh_, effects="clip", classes=(nn.Hardtanh,)
    )


def _elementwise() -> Iterator[Operator]:
    two: dict[str, Any] = {"operands": _two, "nonnegative": "kept"}
    add = (operator.add, operator.iadd, torch.add, "add", "add_")
    mul = (
        operator.mul,
        operator.imul,
        torch.mul,
        torch.multiply,
        "mul",
        "mul_",
        "multiply",
    )
    yield _row("add", *add, syntax="Add", module="Add", **two)
    yield _row("mul", *mul, syntax="Mult", module="Mul", **two)
    yield _row("maximum", torch.maximum, "maximum", module="Maximum", **two)
    yield _row("pad", F.pad, operands=_padded, nonnegative="kept")
    yield _row("interpolate", F.interpolate, operands=_resized, nonnegative="kept")
    yield _row("sub", operator.sub, operator.isub, torch.sub, "sub", "sub_")
    yield _row("div", operator.truediv, operator.itruediv, torch.div, "div", "div_")
    yield _row("pow", operator.pow, operator.ipow, torch.pow, "pow", "pow_")
    cat = (torch.cat, torch.concat, torch.concatenate)
    yield _row("cat", *cat, module="Cat", operands=_listed, nonnegative="kept")
    module = "ScaledDotProductAttention"
    attend = F.scaled_dot_product_attention
    attention: dict[str, Any] = {"kind": "attention", "module": module, "layer": module}
    yield _row(operator_name(attend), attend, operands=_three, **attention)


def _moves() -> Iterator[Operator]:
    """Yield what rearranges elements. ``Tensor.view`` counts only without a dtype."""
    names = (
        "reshape view squeeze unsqueeze permute transpose swapaxes movedim contiguous"
    )
    yield from _rows(names, "move view")
    effects = "move view"
    yield _row(
        "flatten", torch.flatten, "flatten", effects=effects, classes=(nn.Flatten,)
    )
    yield _row(
        "channel_shuffle",
        F.channel_shuffle,
        effects=effects,
        classes=(nn.ChannelShuffle,),
    )
    yield _row(
        "pixel_shuffle", F.pixel_shuffle, effects=effects, classes=(nn.PixelShuffle,)
    )


def _views() -> Iterator[Operator]:
    yield from _rows("getitem chunk split tensor_split", "part view")
    yield from _rows(
        "select narrow slice unbind split_with_sizes unsafe_chunk unsafe_split expand broadcast_to "
        "unflatten ravel t swapdims moveaxis diagonal unfold as_strided alias detach getattr "
        "float half double bfloat16 cpu cuda real imag view_as_real view_as_complex positive conj "
        "atleast_1d atleast_2d atleast_3d broadcast_tensors tuple list dict T mT mH H adjoint "
        "lift_fresh_copy to_copy as_tensor hsplit vsplit dsplit resolve_conj resolve_neg "
        "dropout1d dropout2d dropout3d alpha_dropout feature_dropout native_dropout",
        "view",
    )
    yield _row("identity", effects="view", classes=(nn.Identity,))
    yield _row(
        "dropout", F.dropout, torch.dropout, effects="view", classes=(nn.Dropout,)
    )
    yield from _rows("view_as reshape_as expand_as type_as to", "view as")
    yield from _rows(
        "zeros_like ones_like full_like empty_like rand_like randn_like "
        "new_zeros new_ones new_full new_empty",
        "like",
    )


def _reads() -> Iterator[Operator]:
    yield from _rows(
        "size shape dim ndim ndimension numel nelement len", "metadata shape"
    )
    yield from _rows(
        "stride layout is_contiguous dtype device get_device element_size names requires_grad "
        "is_complex is_cuda is_floating_point is_inference is_quantized untyped_storage",
        "metadata",
    )
    yield _row("type", "type", effects="metadata view")


def operator_name(target: object) -> str:
    """Return the name of what a node calls: of a method (a string) or of a function."""
    return (
        target if isinstance(target, str) else getattr(target, "__name__", str(target))
    )


def function_name(function: object) -> str:
    """Return the name of a function that a run calls, or of a property such as ``shape``."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return name


#: Every row, by :attr:`Operator.name`.
OPERATORS: Registry[str, Operator] = Registry("operator")
_TARGETS: Registry[object, Operator] = Registry("operator for")
_NAMES: dict[str, Operator] = {}
_CLASSES: Registry[type, Operator] = Registry("operator for")


def add_operator(row: Operator) -> Operator:
    """Add a row to the table, and return it."""
    OPERATORS.add(row.name, row)
    names = (*row.methods, *([f"__{row.name}__"] if row.syntax else []))
    tensor_methods = (getattr(torch.Tensor, name, None) for name in names)
    for target in dict.fromkeys(
        (*row.functions, *row.methods, *filter(callable, tensor_methods))
    ):
        _TARGETS.add(target, row)
    for cls in row.classes:
        _CLASSES.add(cls, row)
    if row.module:
        KINDS[row.word] = row.module
    for target in (row.name, *row.functions, *row.methods):
        _NAMES.setdefault(operator_name(target).strip("_"), row)
    return row


#: Every kind that :func:`operator_kind` returns, with the module of torchq that stands for it.
KINDS: dict[str, str] = {}

_GROUPS = (
    _elementwise,
    _activations,
    _clips,
    _pools,
    _layers,
    _products,
    _moves,
    _views,
    _reads,
)
for _group in _GROUPS:
    for _found in _group():
        add_operator(_found)


def operator_of(target: object) -> Operator | None:
    """Return the row of a function, of a method (a string) or of a module; None without a row."""
    if isinstance(target, nn.Module):
        rows = (_CLASSES.get(cls) for cls in type(target).__mro__)
        return next((row for row in rows if row is not None), None)
    try:
        return _TARGETS.get(target)
    except TypeError:  # not hashable, so no function of torch
        return None


def operator_named(name: str) -> Operator | None:
    """Return the row of a function or method by its name, as a run or ATen spells it."""
    return _NAMES.get(name.partition(".")[0].strip("_"))


def effects_of(name: str) -> frozenset[str]:
    """Return the :attr:`Operator.effects` of a function or method by its name."""
    row = operator_named(name)
    return frozenset() if row is None else row.effects


#: Clips, with the place of their lower bound.
_BOUNDED = {"clamp": (1, "min"), "clip": (1, "min"), "hardtanh": (1, "min_val")}


def never_negative(
    name: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    is_known: Callable[[Any], bool],
) -> bool:
    """Return True if a call of function ``name`` gives no negative value, whatever it reads.

    ``is_known`` says so of a tensor that the call reads.
    """
    row = operator_named(name)
    if row is None:
        return False
    if row.name in _BOUNDED:
        place, keyword = _BOUNDED[row.name]
        low = args[place] if len(args) > place else kwargs.get(keyword)
        return isinstance(low, (int, float)) and low >= 0
    operands = row.operands(args, kwargs) if row.nonnegative == "kept" else ()
    if not {"move", "view", "part"}.isdisjoint(row.effects):
        operands = args[:1]
    is_fine = (
        is_known(v) if isinstance(v, torch.Tensor) else _is_count(v)
        for v in operands or ()
    )
    return row.nonnegative == "always" or (bool(operands) and all(is_fine))


def _is_count(value: object) -> bool:
    return isinstance(value, (int, float)) and value >= 0


def operator_kind(target: object) -> str | None:
    """Return the kind of a function or method that a module can stand for, or None."""
    row = operator_of(target)
    return row.word if row is not None and row.module else None


def reads_metadata(node: fx.Node) -> bool:
    """Return True if ``node`` reads the shape, dtype or device of a tensor, but no element."""
    return _reads_only(node, "metadata")


def reads_shape(node: fx.Node) -> bool:
    """Return True if ``node`` reads the shape of a tensor and nothing else."""
    return _reads_only(node, "shape")


def _reads_only(node: fx.Node, effect: str) -> bool:
    if node.op == "call_method":
        return effect in effects_of(str(node.target))
    is_attribute = node.op == "call_function" and node.target is getattr
    return is_attribute and effect in effects_of(str(node.args[1]))


#: The functions behind ``x += y`` and its like.
_NAMES_OF_ASSIGNING = (
    "iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ior ixor"
)
ASSIGNING = frozenset(getattr(operator, name) for name in _NAMES_OF_ASSIGNING.split())

#: The mark of a node for ``x += y``, whose target is that of ``x + y``.
OVERWRITES = "torchq_overwrites"
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, _DropoutNd, nn.Sequential)
_KNOWN = frozenset(["torch", "torchq", "_operator", "operator", "builtins", "math"])


def writes(node: fx.Node, module: nn.Module | None) -> bool:
    """Return True if ``node`` overwrites one of its inputs, by its name or its options."""
    if node.op == "call_module":
        parts = () if module is None else module.modules()
        return any(getattr(part, "inplace", False) is True for part in parts)
    if node.op not in ("call_function", "call_method"):
        return False
    is_marked = OVERWRITES in node.meta or "out" in node.kwargs
    return is_marked or overwrites(node.target, node.kwargs)


def overwrites(function: object, kwargs: Mapping[str, object]) -> bool:
    """Return True if a call of a function or method (a string) overwrites its first argument."""
    name = operator_name(function).split(".")[0]
    ends = name.endswith("_") and not name.endswith("__")
    special = (
        function in ASSIGNING or name.strip("_") == "setitem" or name.startswith("__i")
    )
    return ends or special or kwargs.get("inplace") is True


def may_write(node: fx.Node, module: nn.Module | None) -> bool:
    """Return True if ``node`` overwrites an input, or runs code that is not known and might."""
    is_foreign = _home(node, module) not in _KNOWN
    return is_foreign or writes(node, module) or _has_positional_flag(node)


def may_alias(node: fx.Node, module: nn.Module | None) -> bool:
    """Return True if the result of ``node`` may share memory with one of its inputs."""
    if not node.op.startswith("call"):
        return False
    if may_write(node, module):
        return True
    if _home(node, module) == "torchq":
        # A quantizer that is switched off returns its input.
        return not (isinstance(module, LAYERS) or getattr(module, "is_new", False))
    if node.op == "call_module":
        return isinstance(module, _VIEW_MODULES)
    return "view" in effects_of(operator_name(node.target))


def memory_of_nodes(
    graph: fx.Graph, root: nn.Module, in_place: Collection[fx.Node] = ()
) -> dict[fx.Node, set[fx.Node]]:
    """Return the nodes whose memory the value of each node may lie in; of new memory, itself.

    ``in_place`` are nodes that return their first input, though they do not look like it.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    memory: dict[fx.Node, set[fx.Node]] = {}
    attributes: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        is_attribute = node.op == "get_attr"
        memory[node] = {
            attributes.setdefault(node.target, node) if is_attribute else node
        }
        if node in in_place or may_alias(node, module):
            inputs = (memory[source] for source in node.all_input_nodes)
            memory[node] = set().union(*inputs) or {node}
    return memory


def overwritten_values(
    node: fx.Node, order: Mapping[fx.Node, int], memory: Mapping[fx.Node, set[fx.Node]]
) -> list[fx.Node]:
    """Return the values whose memory ``node`` overwrites, and whose elements are read after it.

    The first argument of ``node`` is what it overwrites. ``order`` numbers the nodes of the graph.
    """
    first: Any = node.args[0]
    overwritten = []
    for older in order:
        if order[older] >= order[node] or not memory[older] & memory[first]:
            continue
        # A shape that is read later is not overwritten.
        later = [user for user in older.users if order[user] > order[node]]
        if not all(map(reads_metadata, later)):
            overwritten.append(older)
    return overwritten


def _home(node: fx.Node, module: nn.Module | None) -> str:
    """Return the name of the package that the called module or function comes from."""
    home: Any = "torch"
    if node.op == "call_module":
        home = type(module).__module__
    elif node.op == "call_function":
        home = getattr(node.target, "__module__", None) or home
    result: str = home.partition(".")[0]
    return result


def _has_positional_flag(node: fx.Node) -> bool:
    """Return True for ``F.relu(x, True)``, where the flag may be the one called inplace."""
    home = getattr(node.target, "__module__", None)
    flags = any(value is True for value in node.args)
    return node.op == "call_function" and home == "torch.nn.functional" and flags
