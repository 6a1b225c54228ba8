"""The form of a program that the XNNPACK backend of ExecuTorch delegates, as passes on its graph.

The partitioner of ExecuTorch 1.5 matches patterns and says nothing where one is broken: what does
not match stays outside, on slow kernels. Rules that it follows, by its source and by trial:

1.  Activations are int8 with one scale, a Python float, and any zero point, an int.
2.  A weight is int8 in front of ``dequantize_per_channel``; scales float32, zero points int64.
3.  An operator reads DQ alone, and its result has one reader: Q, or ReLU and then Q. So a tensor
    has one Q, and each reader a DQ of its own.
4.  A ReLU of codes without negative values, and a Q of codes that have its grid, are idle. They
    are left out: to round twice moves every code that lies on a tie.
5.  Between an operator and its Q stand no views: each view stands between pairs of one grid.
6.  A layer whose result no Q reads has a float weight. Otherwise its DQ stays outside, and portable
    kernels compute **garbage in silence** where the weight has four dimensions.
7.  What a concatenation reads and returns has one scale; other programs do not load.
8.  Convolutions have two dimensions. ExecuTorch makes those of one dimension two-dimensional itself
    by operators between DQ and the convolution, which breaks the pattern.

Rules 9 and 10, on how a program is lowered and what is counted then, are in ``lower.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

#: A node of torch.fx, whose arguments have a type of many alternatives.
Node: TypeAlias = Any

#: Operators that move elements, or choose some: their results are on the grid of what they read.
_MOVING = frozenset(
    [
        *(
            "view",
            "reshape",
            "flatten",
            "unflatten",
            "squeeze",
            "unsqueeze",
            "contiguous",
            "clone",
        ),
        *("permute", "transpose", "t", "slice", "select", "cat", "max_pool2d"),
        *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    ]
)
#: Operators that return their input in eval mode.
_IDLE = frozenset(
    ["dropout", "feature_dropout", "alpha_dropout", "detach", "alias", "lift_fresh"]
)
#: What kernels compute behind a layer -> its ends, where it does not give them.
_CLAMPS = {"relu": (0.0, None), "relu6": (0.0, 6.0), "hardtanh": (-1.0, 1.0)}
_ATEN = torch.ops.aten
#: Operators of one dimension -> those of two, and the places of sizes that are 0 along a dimension
#: of one element; others are 1.
_WIDER: dict[Any, tuple[Any, tuple[int, ...]]] = {
    _ATEN.conv1d.default: (_ATEN.conv2d.default, (4,)),
    _ATEN.conv1d.padding: (_ATEN.conv2d.padding, ()),
    _ATEN.conv_transpose1d.default: (_ATEN.conv_transpose2d.input, (4, 5)),
    _ATEN.max_pool1d.default: (_ATEN.max_pool2d.default, (3,)),
    _ATEN.avg_pool1d.default: (_ATEN.avg_pool2d.default, (3,)),
    _ATEN.adaptive_avg_pool1d.default: (_ATEN.adaptive_avg_pool2d.default, ()),
}
#: How many dimensions a batch and a weight have of a convolution of one dimension.
_OF_ONE = 3
#: What the backend computes with the convolution in front of it.
_BESIDE = frozenset([*_CLAMPS, "batch_norm"])
_TRANSPOSED = "conv_transpose2d"
#: Layers with a weight at position 1 that have integer kernels.
_LAYERS = frozenset(["linear", "conv2d", _TRANSPOSED])
_GROUPS_OF_TRANSPOSED = 6


def kind_of(node: object) -> str:
    """Return the name of the operator that a node calls: "conv2d"; "" for others."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    parts = str(node.target).split(".")
    return parts[1] if len(parts) > 1 else ""


def path_of(node: Node) -> str:
    """Return the dotted path of the module whose forward called an operator."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("L['self'].") if stack else ""


def write_form(program: ExportedProgram) -> tuple[ExportedProgram, dict[str, str]]:
    """Return the program in the form that is delegated.

    Also return the layers with quantized weights by path, with the reason why one computes in
    float, or "".
    """
    nodes = program.graph.nodes
    if any(n.op == "call_function" and _is_mutable(n) for n in nodes):
        program = program.run_decompositions({})  # in-place operators become others
    graph = program.graph
    add_dimension(program)
    keep_dimensions(graph)
    slice_parts(graph)
    remove_idle(graph)
    quantize_in_front_of_moves(graph)
    quantize_behind_moves(graph)
    merge_pairs(graph)
    one_pair_for_each_reader(graph)
    layers = store_float_weights(program)
    _remove_unread(program)
    _name_results(program)
    graph.lint()
    program.graph_module.recompile()
    return program, layers


def _is_mutable(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


# --- pairs --------------------------------------------------------------------------------------


def is_q(node: object) -> bool:
    """Return True for the Q operator of an activation."""
    return kind_of(node) == "quantize_per_tensor"


def is_dq(node: Any) -> bool:
    """Return True for the DQ operator of an activation."""
    return kind_of(node) == "dequantize_per_tensor" and node.args[0].op != "placeholder"


def _grid(node: Node) -> tuple[Any, ...]:
    return tuple(node.args[1:6])


def _inputs(node: Node) -> list[Node]:
    """Return the tensors that a moving operator reads."""
    first = node.args[0]
    return list(first) if isinstance(first, (list, tuple)) else [first]


def _insert(graph: fx.Graph, source: Node, grid: tuple[Any, ...]) -> Node:
    """Return a new pair behind a node; nothing reads it yet."""
    library = torch.ops.quantized_decomposed
    last = source
    for operator in (
        library.quantize_per_tensor.default,
        library.dequantize_per_tensor.default,
    ):
        with graph.inserting_after(last):
            new = graph.call_function(operator, (last, *grid))
        new.meta.update({**source.meta, "val": operator(last.meta["val"], *grid)})
        last = new
    return last


def _replace(old: Node, new: Node) -> None:
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def _is_mean_of_images(node: Node) -> bool:
    """Return True for mean(x, dims) of (N, C, H, W) over H and W, without keepdim."""
    if kind_of(node) != "mean" or len(node.args) != 2:
        return False
    source, dims = node.args
    is_image = len(source.meta["val"].shape) == 4
    return (
        is_image
        and isinstance(dims, list)
        and sorted(dim % 4 for dim in dims) == [2, 3]
    )


def _moves(node: object) -> bool:
    """Return True for operators whose results are elements of what they read."""
    return kind_of(node) in _MOVING or (
        kind_of(node) == "pad" and not _pads_with_numbers(node)
    )


def _pads_with_numbers(node: Any) -> bool:
    """Return True for one number around a tensor, not elements of the tensor itself."""
    if kind_of(node) != "pad":
        return kind_of(node) == "constant_pad_nd"
    modes = (*node.args[2:3], node.kwargs.get("mode", "constant"))
    return bool(modes[0] == "constant")


def _pads_with_zeros(node: Any) -> bool:
    """Return True for zeros around a tensor; every grid has a code for zero."""
    if not _pads_with_numbers(node):
        return False
    place = 2 if kind_of(node) == "constant_pad_nd" else 3
    values = (*node.args[place : place + 1], node.kwargs.get("value"))
    return not values[0]


def keep_dimensions(graph: fx.Graph) -> None:
    """Let the mean of each channel of an image keep its dimensions: XNNPACK has no other mean.

    Before: mean(x, (2, 3)) of (N, C, H, W). After: the mean as (N, C, 1, 1) -> view as (N, C).
    """
    for node in list(graph.nodes):
        if not _is_mean_of_images(node):
            continue
        flat = tuple(node.meta["val"].shape)
        node.args = (*node.args, True)
        with graph.inserting_after(node):
            view = graph.call_function(torch.ops.aten.view.default, (node, list(flat)))
        node.replace_all_uses_with(view, lambda user, view=view: user is not view)
        view.meta.update(node.meta)
        node.meta = {**node.meta, "val": view.meta["val"].reshape((*flat, 1, 1))}


def add_dimension(program: ExportedProgram) -> None:
    """Give convolutions and pools of one dimension a second one, of one element.

    Before: conv1d -> ReLU. After: view -> conv2d -> ReLU -> view; its stored codes have the
    dimension too. A ReLU and a BatchNorm stay next to the convolution, which computes them.
    """
    _add_dimension_to_codes(program)
    for node in list(program.graph.nodes):
        if node.target not in _WIDER:
            continue
        wider, zeros = _WIDER[node.target]
        source, *rest = node.args
        arguments = [_viewed(source, _as_image(source.meta["val"].shape))]
        for place, value in enumerate(rest, 1):
            if isinstance(value, (list, tuple)) and value:
                value = [*value, 0 if place in zeros else 1]
            elif place == 1 and value.meta["val"].dim() == _OF_ONE:
                value = _call_behind(value, _ATEN.unsqueeze.default, value, -1)
            arguments.append(value)
        last = node
        wide = _call_behind(last, wider, *arguments)
        is_batch = source.meta["val"].dim() == _OF_ONE
        beside = _BESIDE if is_batch else _CLAMPS.keys()
        while len(last.users) == 1 and kind_of(next(iter(last.users))) in beside:
            last = next(iter(last.users))
            wide = _call_behind(last, last.target, wide, *last.args[1:])
        _replace(last, _viewed(wide, list(last.meta["val"].shape)))
    _remove_unused(program.graph)


def _as_image(shape: Sequence[int]) -> list[int]:
    """Return the shape (N, C, L, 1) for (N, C, L), and (1, C, L, 1) for (C, L)."""
    return [*([1] * (_OF_ONE - len(shape))), *shape, 1]


def _viewed(source: Node, shape: list[int]) -> Node:
    """Return a view of a tensor, which the backend computes, as it does not squeeze one."""
    return _call_behind(source, _ATEN.view.default, source, shape)


def _add_dimension_to_codes(program: ExportedProgram) -> None:
    """Store weights that only convolutions of one dimension read with one dimension more."""
    for codes in program.graph.nodes:
        if codes.op != "placeholder":
            continue
        dequantized = list(codes.users)
        readers = [reader for node in dequantized for reader in node.users]
        are_weights = all(
            reader.target in _WIDER and reader.args[1] in dequantized
            for reader in readers
        )
        are_codes = all(
            kind_of(node).startswith("dequantize_per") and node.args[0] is codes
            for node in dequantized
        )
        if readers and are_weights and are_codes:
            program.state_dict[_target(program, codes)] = _held(
                program, codes
            ).unsqueeze(-1)
            for node in (codes, *dequantized):
                node.meta["val"] = node.meta["val"].unsqueeze(-1)


def _call_behind(last: Node, operator: Any, *arguments: Any) -> Node:
    """Return a new call of an operator behind a node, with the origin of this node."""
    with last.graph.inserting_after(last):
        call = last.graph.call_function(operator, arguments)
    values = fx.node.map_arg(arguments, lambda node: node.meta["val"])
    call.meta.update({**last.meta, "val": operator(*values)})
    return call


def slice_parts(graph: fx.Graph) -> None:
    """Take parts of a tensor one by one: XNNPACK has no operator with several results.

    Before: chunk or split -> getitem for each part. After: a slice for each part.
    """
    for node in list(graph.nodes):
        if kind_of(node) not in ("chunk", "split", "split_with_sizes"):
            continue
        source = node.args[0]
        dim = (*node.args, node.kwargs.get("dim", 0))[2]
        lengths = [part.shape[dim] for part in node.meta["val"]]
        for getitem in list(node.users):
            start = sum(lengths[: getitem.args[1]])
            arguments = (source, dim, start, start + lengths[getitem.args[1]])
            with graph.inserting_before(getitem):
                part = graph.call_function(torch.ops.aten.slice.Tensor, arguments)
            part.meta.update(getitem.meta)
            _replace(getitem, part)
        graph.erase_node(node)


def remove_idle(graph: fx.Graph) -> None:
    """Leave out what changes nothing.

    Before: dropout; ReLU and its like behind DQ, whose codes stand for values inside its range.
    After: their readers read what they read.
    """
    for node in list(graph.nodes):
        if kind_of(node) in _IDLE or _is_idle_clamp(node):
            _replace(node, node.args[0])


def _is_idle_clamp(node: Node) -> bool:
    """Return True for a clamp of values that are all inside, as the codes that it reads show."""
    kind = kind_of(node)
    if kind not in _CLAMPS and kind != "clamp":
        return False
    source = node.args[0]
    while _moves(source) and kind_of(source) != "cat":
        source = source.args[0]
    if not is_dq(source):
        return False
    bounds = list(node.args[1:3])
    usual = list(_CLAMPS.get(kind, (None, None)))
    low, high = bounds + usual[len(bounds) :]
    scale, zero_point, least, largest, _ = _grid(source)
    above = low is None or (least - zero_point) * scale >= low
    return above and (high is None or (largest - zero_point) * scale <= high)


def quantize_in_front_of_moves(graph: fx.Graph) -> None:
    """Let what computes a tensor be read by Q, where that Q stands behind views.

    Before: conv -> view -> Q, or zeros around. A concatenation -> Q, which reads other grids than
    that of Q.
    After: conv -> Q -> DQ -> view -> Q, and as much for all that the concatenation reads. No value
    changes, as every reader of the view is a Q of this grid.
    """
    pending = [node for node in graph.nodes if is_q(node)]
    while pending:
        quantize = pending.pop()
        moved = quantize.args[0]
        grid = _grid(quantize)
        keeps_grid = _moves(moved) or _pads_with_zeros(moved)
        if not keeps_grid or not _all_quantize(moved, grid):
            continue
        for source in dict.fromkeys(_inputs(moved)):
            if not (is_dq(source) and _grid(source) == grid):
                pair = _insert(graph, source, grid)
                moved.replace_input_with(source, pair)
                pending.append(pair.args[0])


def _all_quantize(node: Node, grid: tuple[object, ...]) -> bool:
    return all(is_q(user) and _grid(user) == grid for user in node.users)


def quantize_behind_moves(graph: fx.Graph) -> None:
    """Put a pair behind what moves elements of one grid: kernels of bytes move them.

    Before: DQ -> view -> anything. After: DQ -> view -> Q -> DQ -> anything. No value changes.
    """
    for node in list(graph.nodes):
        if not _moves(node) and kind_of(node) != "relu":
            continue
        sources = _inputs(node)
        if not all(map(is_dq, sources)) or len({_grid(s) for s in sources}) != 1:
            continue
        grid = _grid(sources[0])
        if not _all_quantize(node, grid):
            readers = list(node.users)
            pair = _insert(graph, node, grid)
            for reader in readers:
                reader.replace_input_with(node, pair)


def merge_pairs(graph: fx.Graph) -> None:
    """Let a tensor have one Q for a grid, and none where it has the codes already.

    Before: two Q of one grid read a tensor. DQ -> Q of one grid.
    After: one Q is left; the readers of the second Q read the first codes.
    """
    first_by_grid: dict[tuple[object, ...], Node] = {}
    for node in list(graph.nodes):
        if not is_q(node):
            continue
        source = node.args[0]
        grid = _grid(node)
        if is_dq(source) and _grid(source) == grid:
            _replace(node, source.args[0])
        elif (first := first_by_grid.setdefault((source, *grid), node)) is not node:
            _replace(node, first)
    _remove_unused(graph)


def one_pair_for_each_reader(graph: fx.Graph) -> None:
    """Give each reader of a DQ, also of a weight's, one of its own."""
    for node in list(graph.nodes):
        if not kind_of(node).startswith("dequantize_per"):
            continue
        for reader in list(node.users)[1:]:
            with graph.inserting_after(node):
                duplicate = graph.node_copy(node)
            reader.replace_input_with(node, duplicate)


def _remove_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if kind_of(node) and not node.users and not _is_mutable(node):
            graph.erase_node(node)


# --- weights ------------------------------------------------------------------------------------


def store_float_weights(program: ExportedProgram) -> dict[str, str]:
    """Store the weight of a layer that has no integer kernel as float32.

    Return all layers with quantized weights by path, and why each computes in float, or "".

    Before: int8 codes -> DQ -> a layer whose result is not quantized, or another operator.
    After: float32, codes times scale -> the layer.
    """
    of_weights: dict[Node, list[Node]] = {}
    for node in program.graph.nodes:
        if (
            kind_of(node).startswith("dequantize_per")
            and node.args[0].op == "placeholder"
        ):
            of_weights.setdefault(node.args[0], []).append(node)
    reason_by_path: dict[str, str] = {}
    for codes, dequantized in of_weights.items():
        readers = [reader for node in dequantized for reader in node.users]
        reasons = {reader: _why_float(reader) for reader in readers}
        for reader, why in reasons.items():
            reason_by_path[path_of(reader)] = reason_by_path.get(path_of(reader)) or why
        if any(reasons.values()):
            _store_float(program, codes, dequantized)
    return reason_by_path


def _why_float(layer: Node) -> str:
    """Return why no integer kernel computes a layer; "" where one does."""
    kind = kind_of(layer)
    weight = layer.args[1] if len(layer.args) > 1 else None
    if kind not in _LAYERS or not kind_of(weight).startswith("dequantize_per"):
        return f"XNNPACK has no integer kernel for {kind or layer.name}"
    if not _is_quantized(layer.args[0]):
        return "its input is not quantized"
    if kind == _TRANSPOSED:
        groups = (*layer.args, 1)[_GROUPS_OF_TRANSPOSED] if len(layer.args) > 6 else 1
        if groups > 1 and kind_of(weight) == "dequantize_per_channel":
            return "XNNPACK takes one scale for the weight of a transposed convolution with groups"
    readers = list(layer.users)
    if len(readers) == 1 and kind_of(readers[0]) in _CLAMPS:
        readers = list(readers[0].users)
    if len(readers) != 1 or not is_q(readers[0]):
        named = [
            kind_of(r) or "the output of the model"
            for reader in readers
            for r in _behind_moves(reader)
            if not is_q(r)
        ]
        if not named:
            return "its result is quantized with several scales"
        return f"its result is read in float by {', '.join(dict.fromkeys(named))}"
    return ""


def _behind_moves(reader: Node) -> Iterator[Node]:
    """Yield what reads the elements that an operator reads, if it moves them; else itself."""
    if not _moves(reader):
        yield reader
        return
    for behind in reader.users:
        yield from _behind_moves(behind)


def _is_quantized(x: Any) -> bool:
    """Return True for DQ, also with a number around, which the kernels add."""
    if _pads_with_numbers(x):
        x = x.args[0]
    return is_dq(x)


def _store_float(
    program: ExportedProgram, codes: Node, dequantized: Iterable[Node]
) -> None:
    """Let a stored tensor of codes be one of the values that they stand for."""
    first = next(iter(dequantized))
    tensor = _held(program, codes)
    scale = first.args[1]
    if isinstance(scale, fx.Node):
        shape = [-1 if d == first.args[3] else 1 for d in range(tensor.dim())]
        scale = _held(program, scale).reshape(shape)
    value = tensor.to(torch.float32) * scale
    program.state_dict[_target(program, codes)] = value
    fake_mode = codes.meta["val"].fake_mode
    # A size that may vary is the wrong one for a depthwise convolution.
    codes.meta["val"] = fake_mode.from_tensor(value, static_shapes=True)
    for node in dequantized:
        _replace(node, codes)


def _target(program: ExportedProgram, node: Node) -> str:
    return next(
        str(s.target)
        for s in program.graph_signature.input_specs
        if getattr(s.arg, "name", None) == node.name
    )


def _held(program: ExportedProgram, node: Node) -> torch.Tensor:
    """Return the stored tensor that a placeholder stands for."""
    return program.state_dict[_target(program, node)]


_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def _remove_unread(program: ExportedProgram) -> None:
    """Leave out of a program the stored tensors that nothing reads: float weights, and ranges."""
    signature = program.graph_signature
    unread = {
        n.name: n for n in program.graph.nodes if n.op == "placeholder" and not n.users
    }
    remaining = []
    for spec in signature.input_specs:
        node = unread.get(getattr(spec.arg, "name", ""))
        if node is None or spec.kind not in _HELD:
            remaining.append(spec)
            continue
        program.graph.erase_node(node)
        program.state_dict.pop(spec.target, None)
        program.constants.pop(spec.target, None)
    signature.input_specs[:] = remaining


def _name_results(program: ExportedProgram) -> None:
    """Let the signature name the nodes that are results now."""
    *_, output = program.graph.nodes
    specs = program.graph_signature.output_specs
    for spec, node in zip(specs, output.args[0], strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
