"""From a trace of integer layers to a graph that hands codes from layer to layer.

:class:`Fusion` walks a trace in known forms backwards, from readers to what they read, and notes in
which form each result is wanted: as values, or as codes of some qparams. The first rule of
:data:`RULES` that fits a node passes wishes on to what it reads, and returns what writes the node
into the new graph. So a wish for codes goes through all that commutes with rounding until a kernel
can fulfil it.
"""

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchq.graph import memory_of_nodes, operator_name, reads_shape, writes
from torchq.lowering import match
from torchq.lowering.codes import CodesAvgPool2d, CodesMaxPool2d, Dequantize, Quantize
from torchq.lowering.kernel import ACTIVATIONS
from torchq.lowering.known_forms import (
    Node,
    read_results_of_writes,
    rounded,
    to_known_forms,
)
from torchq.lowering.layer import Int8Conv, Int8Layer
from torchq.lowering.qparams import ByteQParams

#: Functions of finite numbers that are finite, in float32 and for values as large as codes stand
#: for, and how many of them may follow each other.
_FINITE_FUNCTIONS = (
    operator.mul,
    operator.add,
    torch.mul,
    torch.add,
    F.adaptive_avg_pool2d,
)
_FINITE_MODULES = (
    nn.Sigmoid,
    nn.Hardsigmoid,
    nn.SiLU,
    nn.Hardswish,
    nn.ReLU,
    nn.Hardtanh,
)
_LONGEST = 4
_INF = float("inf")
#: Writes a node into the new graph.
Write = Callable[[], None]
#: Codes in the new graph, and how they are to be read.
Codes = tuple[Node, ByteQParams]


def fuse_graph(trace: fx.GraphModule, dtype: torch.dtype) -> fx.Graph | None:
    """Return the fused graph of a trace, in which floating-point results have a dtype.

    The modules that it calls are added to the trace. It is None where calls in place leave open in
    which order the graph computes.
    """
    if not read_results_of_writes(trace):
        return None
    to_known_forms(trace)
    return Fusion(trace, dtype).run()


@dataclass
class Wish:
    """How readers want the codes of a tensor.

    Attributes:
        keeps_zero: the zero point must not move, as the codes are concatenated with others.
        dtype: of the tensor, which is checked; None for any.
    """

    keeps_zero: bool = False
    dtype: torch.dtype | None = None


class Fusion:
    """A trace, what its readers want, and the graph that is written for them.

    Attributes:
        carried: node -> the qparams of the codes that its values are made from.
        values: the nodes that are wanted as values.
        wishes: node -> the codes that are wanted.
        values_of: node -> its values in the new graph.
    """

    def __init__(self, trace: fx.GraphModule, dtype: torch.dtype) -> None:
        self.trace = trace
        self.dtype = dtype
        self.graph = fx.Graph()
        self.carried: dict[Node, ByteQParams] = {}
        self.values: set[Node] = set()
        self.wishes: dict[Node, dict[ByteQParams, Wish]] = defaultdict(dict)
        self._settled: dict[Node, dict[ByteQParams, ByteQParams]] = {}
        self._writes: dict[Node, Write] = {}
        self.values_of: dict[Node, Node] = {}
        self._written_codes: dict[tuple[Node, ByteQParams], Codes] = {}
        self._parts: dict[str, nn.Module] = {}
        self._taken = dict(trace.named_modules(remove_duplicate=False))

    def run(self) -> fx.Graph:
        """Return the new graph."""
        nodes: list[Node] = list(self.trace.graph.nodes)
        required = {node for node in nodes if _is_kept(node)} | self._writes_of_others()
        for node in nodes:
            self._find_carried(node)
        for node in reversed(nodes):
            if node in self.values or node in self.wishes or node in required:
                self._settle(node)
                writes = (rule(self, node) for rule in RULES)
                self._writes[node] = next(
                    write for write in writes if write is not None
                )
        for node in nodes:
            if node in self._writes:
                self._writes[node]()
        for name, part in self._parts.items():
            self.trace.add_submodule(name, part)
        return self.graph

    def _writes_of_others(self) -> set[Node]:
        """Return the nodes that overwrite an argument of the model or a tensor that it holds."""
        memory = memory_of_nodes(self.trace.graph, self.trace)
        overwriting = set()
        for node in memory:
            path = str(node.target)
            called = (
                self.trace.get_submodule(path) if node.op == "call_module" else None
            )
            first = match.input_node(node)
            if first is not None and writes(node, called):
                roots = memory[first]
                if any(root.op in ("placeholder", "get_attr") for root in roots):
                    overwriting.add(node)
        return overwriting

    def _find_carried(self, node: Node) -> None:
        if node.target is rounded:
            self.carried[node] = node.args[1]
        tensors = self.moved(node)
        grids = {self.carried.get(tensor) for tensor in tensors}
        if len(grids) == 1 and None not in grids:
            (self.carried[node],) = grids  # type: ignore[assignment]

    # --- what a trace says ------------------------------------------------------------------

    def layer(self, node: object) -> Int8Layer | None:
        """Return the integer layer that ``node`` calls."""
        module = match.module_of(node, self.trace)
        return module if isinstance(module, Int8Layer) else None

    def moved(self, node: Node) -> list[Node]:
        """Return the tensors of a node that commutes with rounding; an empty list for others."""
        if operands := match.concat_operands(node):
            return list(dict.fromkeys(operands))
        source = match.view_source(node, self.trace)
        if source is None and match.pool_of(node, self.trace, nn.MaxPool2d) is not None:
            source = match.input_node(node)
        if (
            source is None
            and node.target is operator.getitem
            and node.args[0] in self.carried
        ):
            source = node.args[0]
        return [] if source is None else [source]

    def is_nonnegative(self, node: Node) -> bool:
        """Return True if the result of ``node`` is known to hold no negative number."""
        if node.target is rounded:
            return bool(node.args[1].quant_min >= node.args[1].zero_point)
        bounds = match.clamp_bounds(match.activation_of(node, self.trace))
        if bounds is not None:
            return bounds[0] >= 0
        keeps_sign = bool(self.moved(node)) or match.preserves_nonnegative(
            node, self.trace
        )
        return keeps_sign and all(map(self.is_nonnegative, node.all_input_nodes))

    # --- what readers want ------------------------------------------------------------------

    def want(self, *nodes: Node) -> None:
        """Note that nodes are wanted as values."""
        self.values.update(nodes)

    def want_codes(
        self, node: Node, qparams: ByteQParams, like: Wish | None = None
    ) -> None:
        """Note that a node is wanted as codes."""
        wish, like = self.wishes[node].setdefault(qparams, Wish()), like or Wish()
        wish.keeps_zero |= like.keeps_zero
        wish.dtype = wish.dtype or like.dtype

    def _settle(self, node: Node) -> None:
        """Leave out the codes of negative numbers, once all that read a node are known.

        Kernels without a zero point are faster, and the bias keeps the bits that the correction
        for a zero point costs.
        """
        wishes = self.wishes.pop(node, {})
        settled = self._settled.setdefault(node, {})
        nonnegative = bool(wishes) and self.is_nonnegative(node)
        for qparams, wish in wishes.items():
            settled[qparams] = qparams
            if nonnegative and qparams.quant_min != qparams.zero_point:
                settled[qparams] = qparams.clamped(0.0, _INF, keep_zero=wish.keeps_zero)
            self.want_codes(node, settled[qparams], wish)

    def only_wish(self, node: Node) -> tuple[ByteQParams, Wish] | None:
        """Return the codes that alone are wanted of a node."""
        wishes = self.wishes.get(node, {})
        alone = len(wishes) == 1 and node not in self.values
        return next(iter(wishes.items())) if alone else None

    def is_read_elsewhere(self, node: Node) -> bool:
        """Return True if nodes that are settled already read ``node``."""
        return any(user in self._writes for user in node.users)

    # --- the new graph ----------------------------------------------------------------------

    def written(self, value: Any) -> Any:
        """Return arguments of the trace with the values of the new graph in them."""
        return fx.map_arg(value, self.values_of.__getitem__)

    def codes(self, node: Node, qparams: ByteQParams) -> Codes:
        """Return the codes of a node in the new graph, and how they are to be read.

        Values are quantized here, just before their first reader: what is computed in place is
        done then.
        """
        settled = self._settled[node][qparams]
        if (node, settled) not in self._written_codes:
            value = self.values_of[node]
            quantize = Quantize(settled, self.wishes[node][settled].dtype)
            quantize.finite = self._is_finite(value, _LONGEST)
            codes = self.call(node, "_input", quantize, value)
            self._written_codes[node, settled] = codes, settled
        return self._written_codes[node, settled]

    def call(self, node: Node, suffix: str, module: nn.Module, *args: Node) -> Node:
        """Write a call of a new module, which computes ``node`` or a part of it."""
        base = f"{node.target if node.op == 'call_module' else node.name}{suffix}"
        name = base
        count = 0
        while name in self._parts or (suffix and name in self._taken):
            name, count = f"{base}{'' if suffix else '_again'}_{count}", count + 1
        self._parts[name] = module.eval()
        return self.graph.call_module(name, args)

    def deliver_codes(self, node: Node, written: dict[ByteQParams, Codes]) -> None:
        """Note the codes that were written for a node, and write values where they are wanted."""
        for qparams, codes in written.items():
            self._written_codes[node, qparams] = codes
        written_node, grid = next(iter(written.values()))
        if node in self.values or not self.wishes[node].keys() <= written.keys():
            self.values_of[node] = self.call(
                node, "_values", Dequantize(grid, self.dtype), written_node
            )

    def _is_finite(self, node: Node, longest: int) -> bool:
        """Return True if values are made from codes by few functions that keep them finite.

        Nobody has to look for NaN in these.
        """
        module = self._parts.get(str(node.target)) or match.module_of(node, self.trace)
        if isinstance(module, (Quantize, Dequantize)):
            return True
        if isinstance(module, Int8Layer):  # the second operand is a residual
            return all(
                self._is_finite(x, longest - 1) for x in node.all_input_nodes[1:]
            )
        keeps_finite = (
            isinstance(module, _FINITE_MODULES) or node.target in _FINITE_FUNCTIONS
        )
        operands = node.all_input_nodes
        keeps_finite = keeps_finite and longest > 0 and bool(operands)
        return keeps_finite and all(
            self._is_finite(operand, longest - 1) for operand in operands
        )


def _is_kept(node: Node) -> bool:
    """Return True for what is written though nothing reads it, as checks of arguments are."""
    # ``is_impure`` does not know the function that refuses arguments which are not None.
    checks = operator_name(node.target) == "_assert_is_none"
    return checks or bool(node.is_impure())


# --- rules ----------------------------------------------------------------------------------------


def round_values(fusion: Fusion, node: Node) -> Write | None:
    """Let the codes of a quantizer be those of its input.

    Before: ``rounded(x, q)``. After: ``codes of x``, and ``-> Dequantize`` for other readers.
    """
    if node.target is not rounded:
        return None
    source, qparams = node.args
    wishes = fusion.wishes.get(node, {}).values()
    fusion.want_codes(source, qparams, Wish(any(wish.keeps_zero for wish in wishes)))
    return lambda: fusion.deliver_codes(node, {qparams: fusion.codes(source, qparams)})


def move_codes(fusion: Fusion, node: Node) -> Write | None:
    """Rearrange codes in place of values: those that there are, or those that are wanted alone.

    Before: ``cat([Dequantize(x), Dequantize(y)])``, or ``Quantize(cat([x, y]))``.
    After: ``Dequantize(cat([x, y]))``, or ``cat([Quantize(x), Quantize(y)])``.
    """
    tensors = fusion.moved(node)
    only = fusion.only_wish(node)
    qparams = fusion.carried.get(node) or (only[0] if only else None)
    if not tensors or qparams is None:
        return None
    wishes = list(fusion.wishes.get(node, {}).values())
    keeps_zero = bool(match.concat_operands(node)) or any(
        wish.keeps_zero for wish in wishes
    )
    like = Wish(keeps_zero, wishes[0].dtype if len(wishes) == 1 else None)
    for tensor in tensors:
        fusion.want_codes(tensor, qparams, like)
    fusion.want(*(x for x in node.all_input_nodes if x not in tensors))

    def write() -> None:
        codes_by_tensor = {tensor: fusion.codes(tensor, qparams) for tensor in tensors}
        pool = match.pool_of(node, fusion.trace, nn.MaxPool2d)
        first, grid = codes_by_tensor[tensors[0]]
        for _, other in codes_by_tensor.values():
            grid = grid.joined(other)
        if pool is not None:
            moved = fusion.call(node, "_codes", CodesMaxPool2d(pool), first)
        else:
            moved = fusion.graph.node_copy(
                node,
                lambda x: (
                    codes_by_tensor[x][0] if x in codes_by_tensor else fusion.written(x)
                ),
            )
        fusion.deliver_codes(node, {qparams: (moved, grid)})

    return write


def clamp_codes(fusion: Fusion, node: Node) -> Write | None:
    """Turn a clamp of which codes alone are wanted into bounds of these: rounding keeps order.

    Before: ``x -> ReLU -> Quantize(q)``. After: ``x -> Quantize(q, codes >= zero_point)``.
    """
    bounds = match.clamp_bounds(match.activation_of(node, fusion.trace))
    source = match.input_node(node)
    if bounds is None or source is None or node in fusion.values:
        return None
    clamped_by_grid = {}
    for qparams, wish in fusion.wishes[node].items():
        clamped_by_grid[qparams] = qparams.clamped(*bounds, keep_zero=wish.keeps_zero)
        fusion.want_codes(source, clamped_by_grid[qparams], wish)

    return lambda: fusion.deliver_codes(
        node,
        {
            qparams: fusion.codes(source, clamped)
            for qparams, clamped in clamped_by_grid.items()
        },
    )


def average_codes(fusion: Fusion, node: Node) -> Write | None:
    """Average codes between two quantizers on integers.

    Before: ``codes -> Dequantize(q) -> AvgPool2d -> Quantize(r)``.
    After: ``codes -> CodesAvgPool2d(q, r)``.
    """
    pool = match.pool_of(node, fusion.trace, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
    only = fusion.only_wish(node)
    source = match.input_node(node)
    before = fusion.carried.get(source)
    if pool is None or only is None or before is None:
        return None
    target = only[0]
    fusion.want_codes(source, before)

    def write() -> None:
        codes, grid = fusion.codes(source, before)
        average = CodesAvgPool2d(pool, grid, target)
        averaged = fusion.call(node, "_codes", average, codes)
        fusion.deliver_codes(node, {target: (averaged, target)})

    return write


def fuse_layer(fusion: Fusion, node: Node) -> Write | None:
    """Let the kernel of a layer apply the activation behind it, and round its result.

    Before: ``codes -> Int8Conv -> SiLU -> Quantize(q)``.
    After: ``codes -> Int8Conv(activation="silu", output_qparams=q)``.
    """
    if fusion.layer(node) is not None:
        return _write_layer(fusion, node, node)
    activation = match.activation_of(node, fusion.trace)
    source = match.input_node(node)
    layer = fusion.layer(source)
    if activation is None or layer is None or fusion.is_read_elsewhere(source):
        return None
    if isinstance(layer, Int8Conv) and not ACTIVATIONS[activation[0]].on_conv:
        return None
    return _write_layer(fusion, node, source, activation)


def fuse_add(fusion: Fusion, node: Node) -> Write | None:
    """Let the kernel of a convolution add codes, and round the sum.

    Of floats it would have to copy one, which takes as long as adding them afterwards.

    Before: ``Int8Conv(codes) + Dequantize(r) -> Quantize(q)``.
    After: ``Int8Conv(codes, codes, residual_qparams=r, output_qparams=q)``.
    """
    pair = match.add_operands(node)
    if pair is None or fusion.only_wish(node) is None:
        return None
    conv, other = pair if pair[1] in fusion.carried else pair[::-1]
    layer = fusion.layer(conv)
    adds = (
        isinstance(layer, Int8Conv)
        and len(layer.params.stride) < 3
        and len(conv.args) == 1
    )
    if not adds or other not in fusion.carried or fusion.is_read_elsewhere(conv):
        return None
    return _write_layer(fusion, node, conv, residual=other)


def _write_layer(
    fusion: Fusion,
    node: Node,
    call: Node,
    activation: match.ActivationCall = ("none", ()),
    residual: Node = None,
) -> Write:
    """Return what writes the call of a layer, with all that is computed until ``node``."""
    layer = fusion.layer(call)
    only = fusion.only_wish(node)
    assert layer is not None
    source = match.input_node(call)
    input_grid = layer.input_qparams
    reads_codes = (
        source is not None and not call.kwargs and layer.pre_quant_scale is None
    )
    if reads_codes:
        fusion.want_codes(source, input_grid, Wish(dtype=layer.dtype))
    else:
        fusion.want(*call.all_input_nodes)
    if residual is not None:
        fusion.want_codes(residual, fusion.carried[residual])

    def write() -> None:
        variant = layer.variant()
        variant.activation = activation[0]
        variant.arguments = list(activation[1])
        args, kwargs = (
            ((), {}) if reads_codes else fusion.written((call.args, call.kwargs))
        )
        if reads_codes:
            codes, variant.input_qparams = fusion.codes(source, input_grid)
            args = (codes,)
            variant.reads_codes = True
        if residual is not None:
            codes, variant.residual_qparams = fusion.codes(
                residual, fusion.carried[residual]
            )
            args = (*args, codes)
        written = fusion.call(call, "", variant, *args)
        written.kwargs = kwargs
        if only is None:
            fusion.values_of[node] = written
        else:
            out = _round_to(variant, only[0], only[1].keeps_zero)
            fusion.deliver_codes(node, {only[0]: (written, out)})

    return write


def _round_to(layer: Int8Layer, qparams: ByteQParams, keeps_zero: bool) -> ByteQParams:
    """Let a layer return codes, with a clamp as their bounds; return how these are to be read."""
    bounds = match.clamp_bounds((layer.activation, tuple(layer.arguments)))
    if bounds is not None:
        qparams = qparams.clamped(*bounds, keep_zero=keeps_zero)
    layer.output_qparams = qparams
    if bounds is not None and layer.residual_qparams is None:
        saturates = qparams.saturates_by_itself
        layer.activation = "none" if saturates else "clamp"
        layer.arguments = [] if saturates else list(qparams.bounds)
    return qparams


def keep(fusion: Fusion, node: Node) -> Write:
    """Copy any other node, which reads values; the shape of codes is that of their values.

    Before: ``codes -> Dequantize -> x.size()``. After: ``codes -> codes.size()``.
    """
    carried = fusion.carried if reads_shape(node) else {}
    kind = node.target
    for source in node.all_input_nodes:
        if source in carried:
            fusion.want_codes(source, carried[source])
        else:
            fusion.want(source)

    def of(source: Node) -> Node:
        if source in carried:
            return fusion.codes(source, carried[source])[0]
        return fusion.written(source)

    def write() -> None:
        if dataclasses.is_dataclass(kind) and node.args:  # a dictionary with fields
            copied = fusion.graph.call_function(
                node.target, (), fusion.written(node.args[0])
            )
        else:
            copied = fusion.graph.node_copy(node, of)
        if node.op != "output":
            fusion.values_of[node] = copied

    return write


#: What becomes of a node: the first rule that fits. Clamps become part of codes before kernels
#: would compute them, and kernels take what nothing else could.
RULES: tuple[Callable[[Fusion, Node], Write | None], ...] = (
    round_values,
    move_codes,
    clamp_codes,
    average_codes,
    fuse_add,
    fuse_layer,
    keep,
)
