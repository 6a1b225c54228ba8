"""ONNX Runtime: integer kernels for convolutions and matrix products, on CPUs and GPUs.

Sources: what versions 1.31 and 1.32 were seen to fuse, and measurements with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torchq.errors import ConfigError, ExportError
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    attribute,
    computed_by,
    data_type,
    fresh_name,
    is_constant,
    is_output,
    nodes_of,
    readers,
    replace_stored,
    value_of,
)
from torchq.onnx.passes.convolutions import (
    constant_fill,
    convolve_averages,
    fit_biases,
    gather_shuffled,
    merge_groups,
    with_lengths,
)
from torchq.onnx.passes.matmuls import split_gemms
from torchq.onnx.passes.pairs import separate_clips
from torchq.onnx.qdq import (
    FLOAT_WEIGHT,
    leads_only_to_quantizers,
    pair_name,
    qparams_of,
    starts_at_zero,
)
from torchq.runtime import Arithmetic, Codes, FileRules, Placement
from torchq.runtimes.checks import (
    ACTIVATIONS,
    AVG_POOLS,
    IN_FLOAT,
    IN_FLOAT_FOR_NORMS,
    MAX_POOLS,
    check_one_range_per_tensor,
    check_unfolded_norms,
    dequantized,
    has_quantized_weight,
    layer_name,
    weight_of,
)
from torchq.runtimes.graph_engine import GraphEngine, file_of, run_by_shape
from torchq.runtimes.inspect import inspect_onnx
from torchq.runtimes.interface import ReadGraph, Run, Shapes
from torchq.runtimes.onnxruntime_arithmetic import OnnxRuntimeArithmetic
from torchq.runtimes.session import Session
from torchq.utils.optional import import_optional

_RESHAPES = ("Flatten", "Reshape", "Squeeze")
_MOVES = (*_RESHAPES, "Transpose", "Unsqueeze")


def store_float_weights(model: Model) -> None:
    """Store the weights of convolutions that run in float as the float values of their codes.

    ONNX Runtime keeps a DequantizeLinear in front of a float convolution, whose weight then is no
    constant: no kernel for its memory layout, no fused activation. Such a convolution takes two
    to three and a half times as long as in float32.

    Before: Conv(x, DequantizeLinear(codes)) whose result is not quantized, or any ConvTranspose.
    After: Conv(x, weight), with ``weight`` the values of the codes.
    """
    for node in nodes_of(model, "Conv", "ConvTranspose"):
        dequantize = weight_of(node)
        if dequantize is None or _runs_on_integers(node):
            continue
        qparams = qparams_of(dequantize)
        values = qparams.dequantize(qparams.centered(value_of(dequantize.inputs[0])))
        name = f"{pair_name(dequantize)}{FLOAT_WEIGHT}"
        node.replace_input_with(1, add_initializer(model.graph, name, values))


def _runs_on_integers(node: Node) -> bool:
    """Return True if a convolution becomes a QLinearConv: codes in, codes out, nothing between."""
    if node.op_type != "Conv" or dequantized(node.inputs[0]) is None:
        return False
    result = node.outputs[0]
    if _quantizers_behind(result):
        return True
    # Codes that begin at 0 include an activation; others leave it, and the convolution in float.
    while not is_output(result) and (activation := _only_reader_of(result)) is not None:
        if activation.op_type not in ("Relu", "Clip"):
            break
        result = activation.outputs[0]
    quantizers = _quantizers_behind(result)
    return bool(quantizers) and all(map(starts_at_zero, quantizers))


def _quantizers_behind(value: Value) -> list[Node]:
    """Return the QuantizeLinear nodes that alone read a value, also behind moves of elements.

    ONNX Runtime quantizes in front of these. Float weights of such a convolution it would quantize
    by itself, with one scale.
    """
    users = readers(value)
    while len(users) == 1 and users[0].op_type in _MOVES and not is_output(value):
        value = users[0].outputs[0]
        users = readers(value)
    only = not is_output(value) and all(user.op_type == "QuantizeLinear" for user in users)
    return users if only else []


def _only_reader_of(value: Value) -> Node | None:
    users = readers(value)
    return users[0] if len(users) == 1 else None


def quantize_reshaped(model: Model) -> None:
    """Quantize what convolutions of codes return in front of reshapes and padding.

    Their kernels then return codes; a convolution would run in float otherwise.

    Before: DequantizeLinear -> Conv -> activations -> reshapes, or zeros that are added around
    images -> QuantizeLinear.
    After: A Q/DQ pair with the parameters of that QuantizeLinear stands in front of the reshapes.
    """
    for node in nodes_of(model, "Conv"):
        if dequantized(node.inputs[0]) is None:
            continue
        last = node
        reader = _only_reader(node)
        while reader is not None and reader.op_type in ("Relu", "Clip"):
            last, reader = reader, _only_reader(reader)
        if reader is None or not _keeps_codes(reader):
            continue
        while reader is not None and _keeps_codes(reader):
            reader = _only_reader(reader)
        if reader is None or reader.op_type != "QuantizeLinear" or attribute(reader, "axis"):
            continue
        _insert_pair(last, list(reader.inputs[1:]))


def _keeps_codes(node: Node) -> bool:
    """Return True for a node that moves values, or adds zeros to them."""
    return node.op_type in _RESHAPES or (node.op_type == "Pad" and constant_fill(node) == 0)


def _only_reader(node: Node) -> Node | None:
    """Return the one node that reads a result, beside those that read its shape."""
    users = [user for user in readers(node.outputs[0]) if user.op_type != "Shape"]
    return users[0] if len(users) == 1 and not is_output(node.outputs[0]) else None


def quantize_concatenated(model: Model) -> None:
    """Quantize the result of operators that move equally quantized values once more.

    Before: All operands of a Concat or MaxPool come from DequantizeLinear with the same parameters,
    and a node reads the result in float.
    After: A Q/DQ pair with these parameters follows. It changes no value, and completes the pattern
    of an integer kernel.
    """
    for node in nodes_of(model, "Concat", "MaxPool"):
        pairs = [dequantized(value) for value in node.inputs]
        settings = {tuple(pair.inputs[1:]) for pair in pairs if pair is not None}
        if None in pairs or len(settings) != 1 or is_output(node.outputs[0]):
            continue
        if not leads_only_to_quantizers(node.outputs[0]):
            _insert_pair(node, list(settings.pop()))


def widen_four_bit_weights(model: Model) -> None:
    """Store codes of 4 bits in 8 bits, but for blocks.

    ONNX Runtime has kernels for weights of 4 bits in blocks alone; it would dequantize others on
    every call.

    Before: DequantizeLinear of stored int4 or uint4 codes, with a scale per tensor or channel.
    After: DequantizeLinear of the same codes, stored as int8 or uint8.
    """
    for node in nodes_of(model, "DequantizeLinear"):
        codes = node.inputs[0]
        if not is_constant(codes) or data_type(codes).bitwidth != 4:
            continue
        if attribute(node, "block_size", 0):
            continue
        for value in (codes, *node.inputs[2:]):
            if value is not None and data_type(value).bitwidth == 4:
                replace_stored(value, value_of(value))
        node.attributes.pop("output_dtype", None)


def _insert_pair(node: Node, parameters: list[Value]) -> None:
    """Insert a QuantizeLinear and a DequantizeLinear behind a node."""
    name = fresh_name(node.graph, f"{node.name}/same")
    result = node.outputs[0]
    users = list(result.uses())
    codes = add_node(node, "QuantizeLinear", [result, *parameters], f"{name}/codes")
    value = add_node(codes.producer(), "DequantizeLinear", [codes, *parameters], f"{name}/value")
    for user, index in users:
        user.replace_input_with(index, value)


def check_float_outputs(model: Model) -> Iterator[str]:
    """Yield quantized convolutions whose output is not quantized, though integers are faster."""
    for node in nodes_of(model, "Conv"):
        if not has_quantized_weight(node) or dequantized(node.inputs[0]) is None:
            continue
        if any(user.op_type == "BatchNormalization" for user in readers(node.outputs[0])):
            continue  # It is said of these once and for all.
        if _is_grouped(node) or any(map(_is_grouped, _behind_relu(node))):
            continue  # Float is the faster one; see ``decide_outputs``.
        if not leads_only_to_quantizers(node.outputs[0], "Relu", "Clip", "Max", "Min"):
            yield (
                f"{layer_name(node)}: its output is not quantized, so it runs in float; use "
                "quantize_ with target='onnxruntime' and an example, or put "
                "torchq.nn.QuantIdentity() behind it, or exclude it"
            )


def _is_grouped(node: Node) -> bool:
    return node.op_type == "Conv" and int(attribute(node, "group", 1)) > 1


def _behind_relu(node: Node) -> list[Node]:
    """Return the nodes that read the result of a node, and those behind a ReLU that reads it."""
    users = readers(node.outputs[0])
    return users + [n for u in users if u.op_type == "Relu" for n in readers(u.outputs[0])]


def check_transposed_convolutions(model: Model) -> Iterator[str]:
    """Yield transposed convolutions with a quantized input, which only costs time."""
    for node in nodes_of(model, "ConvTranspose"):
        if computed_by(node.inputs[0], "DequantizeLinear") is not None:
            yield (
                f"{layer_name(node)}: ONNX Runtime has no integer ConvTranspose; "
                "switch its input quantizer off"
            )


_PLACEMENT = Placement(
    # Integer kernels exist between Q/DQ alone, so every tensor between layers needs a pair.
    operators=frozenset(["add", "mul", "cat", "pool", "matmul", "attention", "activation"]),
    modules=(MAX_POOLS, AVG_POOLS, *ACTIVATIONS),
    float_inputs=("type:torch.nn.modules.conv.ConvTranspose[123]d",),
    quantized_results=True,
    narrow_depthwise=16,
    most_unequal=1.5,
)
# Unsigned codes include the ReLU in front of them; signed ones would keep it, and the convolution
# in float.
_CODES = Codes(stored="unsigned", fitted=True, int32_biases=True)
_FILE = FileRules(
    passes=(
        widen_four_bit_weights,
        quantize_reshaped,
        convolve_averages,
        gather_shuffled,
        quantize_concatenated,
        split_gemms,
        separate_clips,
        store_float_weights,
        fit_biases,
        merge_groups,
    ),
    checks=(
        partial(check_unfolded_norms, IN_FLOAT, IN_FLOAT_FOR_NORMS),
        check_float_outputs,
        check_transposed_convolutions,
        check_one_range_per_tensor,
    ),
)

#: The setting ``provider`` -> the name in ONNX Runtime.
_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class OnnxRuntime(GraphEngine):
    """ONNX Runtime.

    Attributes:
        quantized: see :class:`Engine`.
        provider: whose kernels it uses: ``"cpu"``, or ``"cuda"``, which needs a GPU and the package
            onnxruntime-gpu. The third one is the target "tensorrt".

    Example:
        >>> OnnxRuntime(provider="cpu").label
        'onnxruntime quantized'
    """

    unfolded_norms: ClassVar[str] = IN_FLOAT
    name: str = "onnxruntime"
    placement: Placement | None = _PLACEMENT
    codes: Codes | None = _CODES
    file: FileRules | None = _FILE
    limits: tuple[str, ...] = (
        "GELU, Hardswish, Hardsigmoid, LayerNorm and bilinear resizing have no integer kernel.",
        "Products of 8-bit weights and uint8 codes overflow 16 bits on x86 CPUs without VNNI or "
        "AMX. torchq's sessions set session.x64quantprecision='1' there; do so in yours, or use "
        "torchq.recipes.int8(reduce_range=True).",
    )
    versions: str = "1.31 and 1.32"
    proved: str = "equal codes"
    packages: tuple[str, ...] = ("onnxruntime", "onnx", "onnx_ir")
    session: Callable[..., Any] | None = Session
    provider: str = "cpu"

    def __post_init__(self) -> None:
        allowed = [name for name in _PROVIDERS if (name == "tensorrt") is (self.name == "tensorrt")]
        if self.provider not in allowed:
            raise ConfigError(
                f"OnnxRuntime: got provider {self.provider!r}; expected one of "
                f"{', '.join(map(repr, allowed))}"
            )

    @property
    def arithmetic(self) -> Arithmetic | None:
        """See :attr:`Runtime.arithmetic`; the kernels of the CPU alone are known."""
        return OnnxRuntimeArithmetic() if self.provider == "cpu" else None

    @property
    def label(self) -> str:
        """See :attr:`Engine.label`; providers other than the CPU are named."""
        where = f" on {self.provider}" if self.provider == "cuda" else ""
        return f"{super().label}{where}"

    def check(self) -> None:
        """See :meth:`Engine.check`."""
        super().check()
        runtime = import_optional("onnxruntime", self._needed_by)
        provider = _PROVIDERS[self.provider]
        available = runtime.get_available_providers()
        if provider not in available:
            raise ExportError(
                f"deploy: onnxruntime {runtime.__version__} has no {provider}; expected it for "
                f"provider={self.provider!r}, but there is only {', '.join(available)}. Install "
                "onnxruntime-gpu on a machine with an NVIDIA GPU"
            )

    def open(self, read: ReadGraph, threads: int, usual: Shapes = ()) -> Run:
        """See :meth:`GraphEngine.open`.

        Usual shapes have a graph of their own where it has fewer nodes; fixed shapes alone are no
        faster here.
        """
        graph = read()
        fixed_shapes = usual if with_lengths(graph, usual) is not graph else ()

        def open_for(shapes: Shapes | None) -> Run:
            graph = read()
            return self._session(graph if shapes is None else with_lengths(graph, shapes), threads)

        return run_by_shape(open_for, fixed_shapes, any_batch=True)

    def _session(self, graph: bytes, threads: int) -> Run:
        """Return a file as a function of its inputs; the session keeps no copy of its bytes."""
        provider = _PROVIDERS[self.provider]
        with file_of(graph) as path:
            try:
                return Session(path, optimize=True, threads=threads, provider=provider).run
            except ExportError as error:
                raise ExportError(f"deploy: {error}. Use another target") from error

    def integer_share(self, graph: bytes) -> str:
        """See :meth:`GraphEngine.integer_share`."""
        with file_of(graph) as path:
            report = inspect_onnx(path)
        return f"{len(report.integer)} of {len(report.nodes)} computing nodes run on integers"
