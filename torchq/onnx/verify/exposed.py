"""A file that returns the codes of its quantizers, and what computes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from torchq.functional import QParams
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_node,
    attribute,
    data_type,
    is_constant,
    load_model,
    names,
    onnx_ir,
    readers,
    save_model,
)
from torchq.onnx.qdq import FLOAT_WEIGHT, is_average, pair_name, qparams_of
from torchq.runtime import Runtime, open_session, reference_runtime
from torchq.utils import progress_bar

#: What the session of a file is called whose codes are those of integer kernels.
OPTIMISED = "the optimised file"
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
#: The share of codes that may be another one where a layer gets the same codes. The model adds
#: exactly here, as integer kernels do; single roundings in another order turn over 3e-7 of them.
SHARE = 1e-5
#: The same behind a softmax, a norm, a GELU and the like, which libraries compute by approximations
#: of their own, and behind convolutions that run in float, as they do in front of codes of 4 bits.
#: They differ in the last bits, by up to 1e-6 of a value: of values of 50 codes, 1e-4 lie so close
#: to a border of two. Measured: 7e-5.
APPROXIMATE_SHARE = 1e-4
#: The same behind sums and products of two tensors, whose scales kernels merge. Where two of them
#: are a simple ratio apart, values lie at ties exactly. Measured, in the
#: networks of benchmarks/evaluation.py as all bounds here: 3e-4.
MERGED_SHARE = 6e-4
_MERGED = ("Add", "Mul")
#: The same in OpenVINO, which merges scales of neighbours and multiplies by reciprocals. Where two
#: scales are a simple ratio apart, values lie at ties exactly. Measured: 4e-4; in networks with 4
#: bits, where one of 16 values at a tie is many codes, 1e-2.
OTHER_SHARE, OTHER_SHARE_OF_FEW_BITS = 8e-4, 2e-2
#: The same of codes of 16 bits: a float32 sum of products is right to about 1e-6, which is a tenth
#: of one code among 65,536. Measured: 2e-3.
WIDE_SHARE = 1e-2
#: The same behind averages: the mean of four codes of one scale is a tie in one case of four.
#: Measured: 2e-2.
AVERAGE_SHARE = 4e-2
_AVERAGES = ("AveragePool", "GlobalAveragePool", "ReduceMean")
_APPROXIMATE = names(
    "BatchNormalization Div Elu Erf Exp GRU Gelu GridSample GroupNormalization HardSigmoid "
    "HardSwish InstanceNormalization LSTM LayerNormalization Log LogSoftmax Mish Pow RNN "
    "Reciprocal ReduceL2 Resize RMSNormalization Sigmoid Softmax Softplus Sqrt Tanh"
)
#: What returns values up to 1, with an error that does not get smaller where the values do: ONNX
#: Runtime's sigmoid of -10 is right to 5e-8, a thousandth of itself.
_UP_TO_ONE = names("HardSigmoid Sigmoid Softmax Tanh")
ROUNDING_OF_ONE = 2**-22


@dataclass(frozen=True)
class Ran:
    """What a file computed for one batch.

    Attributes:
        outputs: in order.
        given: the codes of each quantizer, by name, in float32: what is behind it reads them.
        computed: those that what is in front of it computes; the same ones but in a cut file.
    """

    outputs: list[Tensor]
    given: dict[str, Tensor]
    computed: dict[str, Tensor]


class ExposedFile:
    """A file that returns the codes of every quantizer beside its outputs.

    More outputs would change what ONNX Runtime fuses. So it optimises the file as it is; they are
    added to what it saves, and this runs without further optimisations. Files for another runtime,
    and those that ONNX Runtime cannot optimise, are exposed as they are written.

    Of files for another runtime the values of the codes are returned, and the codes are computed
    from them. OpenVINO stores codes that a result shows as the file declares them, int8 among them,
    and otherwise as uint8: the layer behind would run another kernel than in a user's session.

    Attributes:
        session: What runs, in words.
        dropped: The quantizers whose codes ONNX Runtime's optimised session does not have.
    """

    def __init__(
        self,
        path: Path,
        nodes: Mapping[str, Node],
        runtime: Runtime | None,
        *,
        optimized: bool,
    ) -> None:
        codes_by_name = {
            name: str(node.outputs[0].name) for name, node in nodes.items()
        }
        reference = reference_runtime()
        self.dropped: tuple[str, ...] = ()
        self.session = f"the file as it is written in {reference.name}"
        with TemporaryDirectory() as folder:
            file, model = Path(folder, "exposed.onnx"), load_model(path)
            if runtime is reference and optimized:
                # Level EXTENDED: ALL would add layouts of memory, for float kernels.
                session = open_session(path, optimize=True, save_optimized=file)
                saved = load_model(file, check=False)
                saved_values = set(_values(saved))
                self.dropped = tuple(
                    name
                    for name, codes in codes_by_name.items()
                    if codes not in saved_values
                )
                if not self.dropped:
                    self.session = f"{OPTIMISED} in {reference.name}{session.settings}"
                    model = saved
            self._count = len(model.graph.outputs)
            self._names = list(codes_by_name)
            values = _values(model)
            other = runtime if runtime is not reference else None
            self._qparams: dict[str, QParams] = {}
            for name, codes in codes_by_name.items():
                if other is None or not (pairs := _dequantizers(values[codes])):
                    _expose(values[codes], model)
                else:
                    _expose(pairs[0].outputs[0], model)
                    self._qparams[name] = qparams_of(nodes[name])
            save_model(model, file, check=False)
            run = None if other is None else other.opened(file)
            if other is not None and run is not None:
                self.session = f"the file in {other.name}"
            self._run = run or open_session(file, optimize=False).run

    def run(self, feeds: Mapping[str, Tensor]) -> Ran:
        """Return the outputs of the file, and the codes of each quantizer."""
        results = self._run(feeds)
        exposed = dict(zip(self._names, results[self._count :], strict=True))
        for name, qparams in self._qparams.items():
            exposed[name] = qparams.codes(qparams.scaled(exposed[name]))
        return Ran(results[: self._count], exposed, exposed)


class ExposedApart:
    """A file that returns the codes of every quantizer from the session that a user opens.

    A result more may change which kernels a runtime makes of the nodes beside it. So a session
    shows quantizers of which none stands near another: the layer that computes what is shown, and
    those around it, run as in the session of a user. A code at a tie may be another one far in
    front, though, and be taken for the doing of a layer. Where one differs, it and what it reads
    have sessions of their own.

    Attributes:
        session: What runs, in words.
        dropped: Empty, as all codes are shown.
    """

    def __init__(
        self,
        path: Path,
        nodes: Mapping[str, Node],
        runtime: Runtime,
        *,
        progress: bool,
    ) -> None:
        self._path = path
        self._nodes = nodes
        self._runtime = runtime
        self._progress = progress
        self._fronts = _fronts(nodes)
        self._groups = groups_apart(self._fronts)
        self._codes: dict[str, Tensor] = {}
        self.session = f"the file in {runtime.name}, layers shown apart"
        self.dropped: tuple[str, ...] = ()

    def show_alone(self, names: Iterable[str]) -> None:
        """Show quantizers and those in front of them in sessions of their own; keep the others."""
        alone = {near for name in names for near in (name, *self._fronts[name])}
        self._groups = [[name] for name in self._nodes if name in alone]

    def run(self, feeds: Mapping[str, Tensor]) -> Ran:
        """Return the outputs of a user's session, and the codes of each quantizer."""
        bar = progress_bar(
            self._groups, description="layers of the session", enabled=self._progress
        )
        for group in bar:
            nodes = {name: self._nodes[name] for name in group}
            shown = ExposedFile(self._path, nodes, self._runtime, optimized=False)
            self._codes |= shown.run(feeds).computed
        users = ExposedFile(self._path, {}, self._runtime, optimized=False)
        return Ran(users.run(feeds).outputs, self._codes, self._codes)


def _fronts(nodes: Mapping[str, Node]) -> dict[str, set[str]]:
    """Return the quantizers that stand directly in front of each one."""
    names = {node: name for name, node in nodes.items()}
    fronts: dict[str, set[str]] = {}
    for name, node in nodes.items():
        fronts[name] = set()
        pending = [node.inputs[0]]
        visited = {node.inputs[0]}
        while pending:
            current = pending.pop()
            producer = None if current is None else current.producer()
            if producer is None:
                continue
            if producer in names:
                fronts[name].add(names[producer])
                continue
            new = [value for value in producer.inputs if value not in visited]
            visited.update(new)
            pending += new
    return fronts


def groups_apart(fronts: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return few groups of names of which none is near another.

    Args:
        fronts: name -> the names directly in front of it.

    Returns:
        Groups without two names of which one stands in front of the other, directly or behind one
        more, or which stand side by side in front of a third.
    """
    near: dict[str, set[str]] = {name: set() for name in fronts}

    def keep_apart(one: str, other: str) -> None:
        if one != other:
            near[one].add(other)
            near[other].add(one)

    for name, direct in fronts.items():
        for front in direct:
            keep_apart(name, front)
            for other in (*direct, *fronts[front]):
                keep_apart(front, other)
                keep_apart(name, other)
    groups: list[list[str]] = []
    for name in fronts:
        free = (group for group in groups if near[name].isdisjoint(group))
        group = next(free, None)
        if group is None:
            group = []
            groups.append(group)
        group.append(name)
    return groups


def _values(model: Model) -> dict[str, Value]:
    return {str(value.name): value for node in model.graph for value in node.outputs}


def _dequantizers(codes: Value) -> list[Node]:
    """Return the nodes that make float32 values of codes, whose codes these values tell exactly."""
    return [
        node
        for node in readers(codes)
        if node.op_type == "DequantizeLinear"
        and data_type(node.inputs[1]) == onnx_ir.DataType.FLOAT
    ]


def _expose(value: Value, model: Model) -> None:
    """Return codes, or values, of any type as floats, beside the outputs of the file."""
    single = onnx_ir.DataType.FLOAT
    name = f"{value.name}/as float"
    shown = add_node(value.producer(), "Cast", [value], name, {"to": single.value})
    shown.type = onnx_ir.TensorType(single)
    model.graph.outputs.append(shown)


@dataclass(frozen=True)
class Behind:
    """What computes a value from the nearest quantized or given values.

    Attributes:
        layers: The paths of the layers.
        share: how many of its codes may be another one, by the operators among them.
        dtype: the type of a strongly typed file.
        steps: by how much they may be off.
        rounding: by how much the values themselves may be off, where they are small.
        interpolates: values between those of neighbours are computed, as means are. Between codes
            of one scale they lie at ties exactly, and each library adds them in its own order.
    """

    layers: tuple[str, ...]
    share: float
    dtype: torch.dtype | None = None
    steps: int = 1
    rounding: float = 0.0
    interpolates: bool = False


def behind(value: Value | None, share: float = SHARE) -> Behind:
    """Return what computes ``value``; ``share`` is that of the runtime."""
    layers: dict[str, None] = {}
    pending = [value]
    visited = {value}
    rounding = 0.0
    interpolates = False
    while pending:
        current = pending.pop()
        node = None if current is None else current.producer()
        if node is None:
            continue
        if node.op_type in _UP_TO_ONE:
            rounding = ROUNDING_OF_ONE
        interpolates |= _interpolates(node)
        if node.op_type == "DequantizeLinear":
            if is_constant(node.inputs[0]):
                layers[pair_name(node).removesuffix(".weight_quantizer")] = None
            continue
        if node.op_type in _AVERAGES or is_average(node):
            share = max(share, AVERAGE_SHARE)
        elif node.op_type in _MERGED:
            share = max(share, MERGED_SHARE)
        elif node.op_type in _APPROXIMATE:
            share = max(share, APPROXIMATE_SHARE)
        if node.op_type in _LAYERS and any(
            _is_float_weight(v) for v in node.inputs[1:2]
        ):
            share = max(share, APPROXIMATE_SHARE)  # a float kernel
            name = str(node.inputs[1].name)
            quantizer = (
                name.removesuffix(FLOAT_WEIGHT) if name.endswith(FLOAT_WEIGHT) else ""
            )
            layers[quantizer.removesuffix(".weight_quantizer") or str(node.name)] = None
        new = [v for v in node.inputs if v is not None and v not in visited]
        visited.update(new)
        pending += new
    return Behind(tuple(layers), share, rounding=rounding, interpolates=interpolates)


def _interpolates(node: Node) -> bool:
    """Return True for a Resize that computes values between those of neighbours."""
    mode = attribute(node, "mode", "nearest")
    return node.op_type == "Resize" and mode not in ("nearest", b"nearest")


def _is_float_weight(value: Value) -> bool:
    return is_constant(value) and bool(data_type(value).is_floating_point())
