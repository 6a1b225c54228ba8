"""Intel OpenVINO: integer kernels on x86 and Arm CPUs.

Sources: measurements with version 2026.4.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchq.errors import ConfigError, ExportError
from torchq.lowering.kernel import saturates
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    attribute,
    computed_by,
    data_type,
    is_constant,
    names,
    nodes_of,
    readers,
    value_of,
)
from torchq.onnx.passes.constants import Shape, known_shapes
from torchq.onnx.passes.convolutions import with_lengths
from torchq.onnx.passes.pairs import separate
from torchq.onnx.qdq import (
    leads_only_to_quantizers,
    pair_name,
    qparams_of,
    shared_name,
    store_codes,
)
from torchq.runtime import Codes, FileRules, Placement
from torchq.runtimes.checks import (
    AVG_POOLS,
    LAYERS,
    MAX_POOLS,
    check_one_range_per_tensor,
    check_unfolded_norms,
    weight_of,
)
from torchq.runtimes.engine import Engine
from torchq.runtimes.file_engine import EngineModule, run_by_shape
from torchq.runtimes.interface import ReadGraph, Run, Shapes
from torchq.runtimes.onnx_engine import OnnxEngine
from torchq.utils.optional import import_optional


def separate_pairs(model: Model) -> None:
    """Keep two Q/DQ pairs in a row apart, as OpenVINO 2026.4 crashes on them behind a Concat.

    Before: DequantizeLinear -> nothing, a ReLU or a Slice -> QuantizeLinear.
    After: Max(x, x), which is x, stands in front of the QuantizeLinear.
    """
    for node in nodes_of(model, "QuantizeLinear"):
        value = node.inputs[0]
        while (moved := computed_by(value, "Relu", "Clip", "Slice")) is not None:
            value = moved.inputs[0]
        if computed_by(value, "DequantizeLinear") is not None:
            separate(node.inputs[0], node)


#: What OpenVINO moves quantization across.
_TRANSPARENT = names(
    "QuantizeLinear DequantizeLinear Relu Clip MaxPool AveragePool Reshape Transpose Slice Split "
    "Squeeze Unsqueeze Flatten Pad Resize Identity Concat"
)
#: What OpenVINO may make a part of the layer behind it.
_AFFINE = names("Add Sub Mul Div BatchNormalization QuantizeLinear DequantizeLinear")
_PRODUCTS = names("MatMul Gemm")


def unsigned_codes(model: Model) -> None:
    """Write unsigned codes where OpenVINO computes wrong numbers with signed ones.

    The kernels of OpenVINO 2026.4 read unsigned codes, so it adds an offset to signed ones. It does
    not subtract the offset again where a convolution or linear layer reads a concatenation or,
    beside a concatenation, the result of max pooling. Files with unsigned codes and a zero point
    are computed right there, and as fast. Signed codes stay where no layer reads a concatenation,
    as in front of the BatchNorm and ReLU of DenseNet: they are right there, and faster. They stay
    too where a product reads tensors that are joined along another dimension than that of their
    features, which is right, and which OpenVINO cannot compile with a zero point.

    Before: A Concat or MaxPool between Q/DQ pairs with signed codes, whatever moves elements beside
    it, and a layer that reads these codes, or reads them behind a norm.
    After: These pairs have unsigned codes, with the zero point 128.
    """
    values: set[Value] = set()
    shapes = known_shapes(model)
    for node in nodes_of(model, "Concat", "MaxPool"):
        if node.outputs[0] not in values:
            moved = _moved_together(node)
            joins = (computed_by(value, "Concat") for value in moved)
            features = all(_joins_features(one, shapes) for one in joins if one is not None)
            values |= _until_layers(moved, features)
    shared = {shared_name(n) for n in nodes_of(model, "QuantizeLinear") if n.inputs[0] in values}
    for node in nodes_of(model, "QuantizeLinear"):
        if shared_name(node) in shared:
            store_codes(node, signed=False)


def _joins_features(node: Node, shapes: Mapping[str, Shape]) -> bool:
    """Return True if a Concat joins the last dimensions of its operands, as far as is known."""
    axis = int(attribute(node, "axis"))
    shape = shapes.get(str(node.outputs[0].name))
    return axis == -1 or shape is None or axis == len(shape) - 1


def _until_layers(values: set[Value], features: bool) -> set[Value]:
    """Return values with what norms compute from them; nothing if no layer reads any of these.

    With ``features`` products count as layers, besides convolutions.
    """
    pending = list(values)
    reached = set(values)
    is_read = False
    while pending:
        for user in readers(pending.pop()):
            result = user.outputs[0]
            is_read |= user.op_type in LAYERS and (features or user.op_type not in _PRODUCTS)
            if user.op_type in _AFFINE and result not in reached:
                reached.add(result)
                pending.append(result)
    return reached if is_read else set()


def _moved_together(node: Node) -> set[Value]:
    """Return the operands and results of a node, and whatever has the same codes as these."""
    pending = [*node.inputs, *node.outputs]
    values = set()
    while pending:
        value = pending.pop()
        if value is None or value in values:
            continue
        values.add(value)
        producer = computed_by(value, *_TRANSPARENT)
        if producer is not None:
            pending += producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
        for user in readers(value):
            if user.op_type in _TRANSPARENT:
                pending += [*user.outputs, *(user.inputs if user.op_type == "Concat" else ())]
    return values


#: Reductions whose kernels also compute the operators behind them.
_LARGEST = names("ReduceMax ReduceMin GlobalMaxPool")
_MEANS = names("ReduceMean ReduceSum")
#: A bias too small to change a result, and large enough that OpenVINO does not take it for 0.
_LEAST = 1e-30


def separate_reductions(model: Model) -> None:
    """Keep quantization out of the kernels of reductions and of padded average pooling.

    OpenVINO 2026.4 quantizes largest values wrongly in the kernel that computes them, and means and
    sums of other dimensions than those of an image as well: results have errors of a tenth and
    more. It also makes signed codes unsigned, and average pooling then takes padding for the code
    0, which is the least value. It computes the larger one of two values in a kernel that does not
    quantize.

    Before: ReduceMax, or ReduceMean that keeps the last dimension; AveragePool of values that may
    be negative, with padding that counts.
    After: Max(x, x), which is x, stands behind the reduction, or in front of the pooling.
    """
    for node in nodes_of(model, *_LARGEST, *_MEANS):
        if node.op_type in _LARGEST or not _of_images(node):
            separate(node.outputs[0])
    for node in nodes_of(model, "AveragePool"):
        value = node.inputs[0]
        if value.producer() and _counts_padding(node) and not _is_nonnegative(value):
            separate(value, node)


def _counts_padding(pool: Node) -> bool:
    padded = any(attribute(pool, "pads", ())) or attribute(pool, "auto_pad", "NOTSET") != "NOTSET"
    return padded and bool(attribute(pool, "count_include_pad", 0))


def _is_nonnegative(value: Value) -> bool:
    """Return True if codes that begin at 0, or a ReLU, show that no value is negative."""
    moved = computed_by(value, "Concat", "MaxPool")
    if moved is not None:
        return all(map(_is_nonnegative, moved.inputs))
    dequantize = computed_by(value, "DequantizeLinear")
    quantize = None if dequantize is None else computed_by(dequantize.inputs[0], "QuantizeLinear")
    if quantize is None or not is_constant(quantize.inputs[1]):
        return computed_by(value, "Relu") is not None
    qparams = qparams_of(quantize)
    return qparams.has_zero_point(qparams.quant_min)


def _of_images(node: Node) -> bool:
    """Return True if a reduction is one over the last dimensions."""
    axes = attribute(node, "axes")
    if axes is None and len(node.inputs) > 1 and is_constant(node.inputs[1]):
        axes = value_of(node.inputs[1]).tolist()
    return axes is not None and bool({-1, 3} & set(axes))


def own_zero_points(model: Model) -> None:
    """Give each quantized weight a zero point of its own.

    OpenVINO 2026.4 computes a convolution and a product in float whose weights share a tensor of
    zero points, as layers of as many outputs do: once a file with open shapes gets fixed ones, it
    no longer sees that the weights are integers.

    Before: Weights whose DequantizeLinear nodes read one stored tensor of zero points.
    After: Each of these nodes reads a copy.
    """
    read: set[Value] = set()
    for node in nodes_of(model, "DequantizeLinear"):
        zero_points: Value = node.inputs[2] if len(node.inputs) > 2 else None
        if not is_constant(zero_points) or not zero_points.shape:
            continue
        if zero_points in read:
            name = str(zero_points.name)
            codes = value_of(zero_points)
            copy = add_initializer(node.graph, name, codes, data_type(zero_points))
            node.replace_input_with(2, copy)
        read.add(zero_points)


def unequal_biases(model: Model) -> None:
    """Give linear layers whose results are quantized a bias with two values at least.

    OpenVINO 2026.4 makes one kernel of a product of two dimensions and the quantization of its
    result. Where that kernel has no bias, or one number for all channels, it reads memory that
    nobody has written, with one thread and fixed shapes.

    Before: Gemm or MatMul -> Relu or nothing -> QuantizeLinear, without a bias, or with equal ones.
    After: The bias of the first channel is the next larger number of float32, or 1e-30 if it was 0.
    """
    for node in nodes_of(model, "Gemm", "MatMul"):
        weight = weight_of(node)
        result = node.outputs[0]
        if weight is None or not leads_only_to_quantizers(result, "Relu", "Clip"):
            continue
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        codes = value_of(weight.inputs[0])
        width = codes.shape[0 if attribute(node, "transB", 0) else -1]
        old = torch.zeros(width, dtype=torch.float32, device="cpu")
        if bias is not None:
            old = value_of(bias) if is_constant(bias) else torch.arange(2.0, device="cpu")
        if len(old) < 2 or not bool((old == old.flatten()[0]).all()):
            continue
        new = old.clone()
        first = old[..., :1]
        larger = torch.nextafter(first, torch.full_like(first, torch.inf))
        new[..., :1] = torch.where(first == 0, torch.full_like(first, _LEAST), larger)
        name = f"{pair_name(weight)}/bias"
        stored = add_initializer(node.graph, name, new)
        if node.op_type == "Gemm":
            node.resize_inputs(3)
            node.replace_input_with(2, stored)
        else:
            uses = list(result.uses())
            total = add_node(node, "Add", [result, stored], f"{name}/added")
            for user, index in uses:
                user.replace_input_with(index, total)


_PLACEMENT = Placement(
    operators=frozenset(["add", "mul", "cat", "pool", "matmul", "attention"]),
    modules=(MAX_POOLS, AVG_POOLS),
    # Where a convolution's result is quantized and then added, OpenVINO makes one kernel of all,
    # which cuts that result at the ends of its range but does not round it.
    one_branch=True,
    # OpenVINO 2026.4 computes wrong numbers behind a pool or sum of codes that a norm, a recurrent
    # layer or the like reads, and behind a class token that is joined with a batch of open length.
    read_as_codes=frozenset(["add", "pool"]),
    stored_parts=False,
)
# The kernels of CPUs without AMX multiply uint8 by int8. Version 2026.4 refuses products of joined
# tokens that have a zero point, so it has none unless a rule asks.
_CODES = Codes()
_FILE = FileRules(
    float_types=(torch.float32, torch.float16, torch.bfloat16),
    passes=(
        unsigned_codes,
        separate_pairs,
        own_zero_points,
        separate_reductions,
        unequal_biases,
    ),
    checks=(
        # OpenVINO 2026.4 keeps the convolution on integers.
        partial(
            check_unfolded_norms,
            "computed on integers, with a factor and an offset in float",
            LAYERS,
        ),
        check_one_range_per_tensor,
    ),
)

_NEEDED_BY = "deploy(target='openvino')"
#: The setting ``precision`` -> the hint of OpenVINO.
_PRECISIONS = ("f32", "bf16", "f16")
#: Layers of a compiled graph that compute; the others move data and lengths.
_COMPUTING = frozenset(
    [
        *("Convolution", "Deconvolution", "FullyConnected", "MatMul", "Pooling", "Eltwise"),
        *("MVN", "Softmax", "Reduce", "Interpolate", "ScaledDotProductAttention", "Subgraph"),
        *("RNNSeq", "LSTMSequence", "Math"),
    ]
)


@dataclass(frozen=True, kw_only=True, repr=False)
class OpenVino(OnnxEngine):
    """OpenVINO on the CPU.

    Attributes:
        quantized: see :class:`Engine`.
        precision: of what is not quantized. By itself OpenVINO computes in bfloat16 on CPUs that
            can, with errors of a few percent; here the default is ``"f32"``.

    Example:
        >>> OpenVino(quantized=False, precision="bf16").label
        'openvino float bf16'
    """

    name: str = "openvino"
    placement: Placement | None = _PLACEMENT
    codes: Codes | None = _CODES
    file: FileRules | None = _FILE
    limits: tuple[str, ...] = (
        "OpenVINO computes the float parts in bfloat16 on CPUs that have it; "
        'set INFERENCE_PRECISION_HINT="f32" to compare with float32.',
    )
    versions: str = "2026.4"
    proved: str = "per layer"
    packages: tuple[str, ...] = ("openvino", "onnx", "onnx_ir")
    extra: ClassVar[str] = "openvino"
    precision: str = "f32"

    def __post_init__(self) -> None:
        if self.precision not in _PRECISIONS:
            raise ConfigError(
                f"OpenVino: got precision {self.precision!r}; expected one of "
                f"{', '.join(map(repr, _PRECISIONS))}"
            )

    @property
    def label(self) -> str:
        """See :attr:`Engine.label`; precisions other than float32 are named."""
        precision = "" if self.precision == "f32" else f" {self.precision}"
        return f"{super().label}{precision}"

    def excuse(self) -> str:
        """See :meth:`torchq.runtimes.Runtime.excuse`."""
        if not saturates():
            return ""
        return (
            "This CPU has no VNNI instructions, so that products of 8-bit weights can overflow. "
            "Quantize with torchq.recipes.int8(reduce_range=True)"
        )

    def candidates(self) -> tuple[Engine, ...]:
        """See :meth:`Engine.candidates`; bfloat16 only where the CPU multiplies it."""
        runtime = import_optional("openvino", _NEEDED_BY, "openvino")
        capabilities = runtime.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        engines: list[Engine] = []
        for precision in ("f32", "bf16") if "BF16" in capabilities else ("f32",):
            engines += [replace(self, quantized=q, precision=precision) for q in (True, False)]
        return tuple(engines)

    def open(self, read: ReadGraph, threads: int, usual: Shapes = ()) -> Run:
        """See :meth:`FileEngine.open`. Usual shapes have a graph of their own, which is faster."""

        def open_for(shapes: Shapes | None) -> Run:
            run = _bound(self._compile(read(), threads, shapes))
            return run if shapes is not None else _refusing(run, read, usual)

        return run_by_shape(open_for, usual)

    def _compile(self, graph: bytes, threads: int, shapes: Shapes | None) -> Any:
        """Return the compiled graph, for inputs of these shapes or with open lengths."""
        runtime = import_optional("openvino", _NEEDED_BY, "openvino")
        settings = {
            # A thread that is bound to one core waits where another program uses that core.
            "ENABLE_CPU_PINNING": False,
            # Products with weights of 4 bits would quantize their inputs once more.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": self.precision,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        try:
            core = runtime.Core()
            if shapes is not None:
                graph = with_lengths(graph, shapes)
            model = core.read_model(io.BytesIO(graph))
            if shapes is not None:
                model.reshape({name: list(shape) for name, shape in shapes})
            return core.compile_model(model, "CPU", settings)
        except RuntimeError as error:
            raise ExportError(
                f"deploy: openvino {runtime.__version__} cannot run the model ({error}); expected "
                "operators that it knows. Use another target"
            ) from error

    def integer_share(self, module: EngineModule) -> str:
        """See :meth:`FileEngine.integer_share`."""
        nodes = Counter[bool]()
        compiled = self._compile(module.graph_bytes(), torch.get_num_threads(), None)
        for node in compiled.get_runtime_model().get_ops():
            properties = {key: str(value.value) for key, value in node.get_rt_info().items()}
            if properties.get("layerType") in _COMPUTING:
                nodes[properties.get("runtimePrecision", "").lower() in ("u8", "i8")] += 1
        return f"{nodes[True]} of {nodes.total()} computing nodes run on integers"


def _refusing(run: Run, read: ReadGraph, usual: Shapes) -> Run:
    """Return ``run`` with a check of each new image size or length, whatever the batch.

    A graph with open lengths takes images that are smaller than a kernel, and returns what its
    memory held before.
    """
    runtime = import_optional("openvino", _NEEDED_BY, "openvino")
    accepted = {tuple(shape[1:] for _, shape in usual)}

    def checked(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        key = tuple(tuple(value.shape[1:]) for value in feeds.values())
        if key not in accepted:
            shapes = {name: list(value.shape) for name, value in feeds.items()}
            try:
                runtime.Core().read_model(io.BytesIO(read())).reshape(shapes)
            except RuntimeError as error:
                raise _wrong_shapes(feeds, error) from error
            accepted.add(key)
        return run(feeds)

    return checked


def _wrong_shapes(feeds: Mapping[str, Tensor], error: RuntimeError) -> ExportError:
    shapes = {name: tuple(value.shape) for name, value in feeds.items()}
    return ExportError(
        f"openvino: cannot run the model on inputs of shapes {shapes} ({error}); expected shapes "
        "like those of the example"
    )


def _bound(compiled: Any) -> Run:
    """Return a compiled graph as a function that several threads may call."""
    tensor_of = import_optional("openvino", _NEEDED_BY, "openvino").Tensor
    # An input also has the names of nodes that only pass it on, such as casts that change nothing.
    names = [port.get_names() for port in compiled.inputs]
    count = len(compiled.outputs)
    requests = [compiled.create_infer_request()]  # append and pop are atomic

    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        try:
            request = requests.pop()
        except IndexError:  # another thread computes with the last one
            request = compiled.create_infer_request()
        try:
            for index, port_names in enumerate(names):
                (array,) = (value.numpy() for name, value in feeds.items() if name in port_names)
                request.set_input_tensor(index, tensor_of(array, shared_memory=True))
            request.infer()
            # Copies, because the next call overwrites what a request returns.
            arrays = [request.get_output_tensor(i).data.copy() for i in range(count)]
        except RuntimeError as error:
            raise _wrong_shapes(feeds, error) from error
        requests.append(request)
        return [torch.from_numpy(array) for array in arrays]

    return run
