"""The integer product of a layer: its arguments, what it computes, and oneDNN's kernels for it.

The order of scale, bias and rounding is that of :mod:`torchq.runtimes.torch`.
"""

import math
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.errors import InputError
from torchq.lowering.qparams import ByteQParams

#: A bound kernel: codes, and a residual where it adds one, to the result.
Run = Callable[..., Tensor]
#: How many input shapes a layer keeps kernels for. oneDNN itself keeps a thousand: as many as a
#: network of 30 layers needs for this number of shapes.
MOST_SHAPES = 32


class Int8Weights(NamedTuple):
    """The weights of an integer layer, for input codes of one scale and zero point.

    Attributes:
        codes: int8, (out, in / groups, ...).
        scale: float32, (out,) or (1,): real weight = code * scale.
        bias: float32, (out,), or None.
        x_scale: real input = (code - x_zero_point) * x_scale.
        x_zero_point: 0 to 255.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    x_scale: float
    x_zero_point: int


class ConvParams(NamedTuple):
    """The numbers of a convolution, one for each spatial dimension; padding is zeros, both sides.

    A linear layer has none of them.
    """

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def output_shape(
        self, image: Sequence[int], weight: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the shape of the result for the shapes of an input and a weight."""
        if not self.stride:
            return (*image[:-1], weight[0])
        sizes = []
        axes = zip(
            image[2:], weight[2:], self.stride, self.padding, self.dilation, strict=True
        )
        for size, kernel, stride, padding, dilation in axes:
            window = dilation * (kernel - 1) + 1
            sizes.append((size + 2 * padding - window) // stride + 1)
        return (image[0], weight[0], *sizes)

    def as_lists(self) -> tuple[Any, ...]:
        """Return stride, padding, dilation and groups as the operators take them fastest."""
        return (*map(list, self[:3]), self.groups)


class Epilogue(NamedTuple):
    """The last steps of a kernel: add a residual, apply an activation, round to codes.

    Attributes:
        out: how the resulting codes are to be read; None for float32 results.
        activation: a name in :data:`ACTIVATIONS`.
        arguments: of the activation.
        residual: how the codes of a residual are to be read; None where it is floating point.
    """

    out: ByteQParams | None = None
    activation: str = "none"
    arguments: tuple[float, ...] = ()
    residual: ByteQParams | None = None

    def bounds_in_codes(self) -> tuple[float, ...] | None:
        """Return the bounds of codes, relative to the zero point, where only clamps precede them.

        Rounding is monotone, so bounds can be rounded first. Those that a kernel has anyway, since
        results are between 0 and 255, are left out.
        """
        bounds = {
            "none": (-math.inf, math.inf),
            "relu": (0.0, math.inf),
            "clamp": self.arguments,
        }
        if self.out is None or self.activation not in bounds:
            return None
        q = self.out.clamped(*bounds[self.activation], keep_zero=True)
        if q.saturates_by_itself:
            return ()
        return float(q.quant_min - q.zero_point), float(q.quant_max - q.zero_point)


class Activation(NamedTuple):
    """An activation: in plain torch, as oneDNN names it, and whether convolutions take it."""

    function: Callable[..., Tensor]
    onednn: str
    algorithm: str = ""
    on_conv: bool = True


#: Name -> activation.
ACTIVATIONS: dict[str, Activation] = {
    "none": Activation(lambda x: x, "none"),
    "relu": Activation(F.relu, "relu"),
    "clamp": Activation(lambda x, low, high: x.clamp(low, high), "hardtanh"),
    "gelu": Activation(F.gelu, "gelu", "none", on_conv=False),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"), "gelu", "tanh", on_conv=False
    ),
    "silu": Activation(F.silu, "swish"),
    "hardswish": Activation(F.hardswish, "hardswish"),
}
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def reference(
    x: Tensor,
    weights: Int8Weights,
    params: ConvParams,
    epilogue: Epilogue,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the product of uint8 codes by torch's own operators; float64 adds exactly."""
    dims = len(params.stride)
    codes = x.double() - weights.x_zero_point
    multiply = _CONV[dims] if dims else F.linear
    sums = multiply(codes, weights.codes.double(), None, *(params if dims else ()))
    shape = (-1, *[1] * dims)
    y = sums.float() * (weights.scale * weights.x_scale).view(shape)
    y = y if weights.bias is None else y + weights.bias.view(shape)
    return finish(y, epilogue, residual)


def finish(real: Tensor, epilogue: Epilogue, residual: Tensor | None = None) -> Tensor:
    """Return the epilogue of real-valued float32 sums."""
    if residual is not None:
        of = epilogue.residual
        real = real + (residual if of is None else of.dequantize(residual))
    y = ACTIVATIONS[epilogue.activation].function(real, *epilogue.arguments)
    return y if epilogue.out is None else epilogue.out.quantize(y)


_OPERATORS = (
    *("qconv_prepack", "qconv2d_pointwise", "qconv3d_pointwise"),
    *("qlinear_prepack", "qlinear_pointwise"),
)


@lru_cache
def available() -> bool:
    """Return True if this build of torch has oneDNN's integer operators."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.onednn, name) for name in _OPERATORS
    )


class Kernel:
    """The integer weight of a layer, and the calls of oneDNN that read it.

    Layers that are the same one in several places of a model share the object, and so may threads.
    The first call packs the weight and drops the plain one. There is one packed copy for each
    memory layout; :attr:`codes` unpacks one without loss, as copies and files do.
    """

    def __init__(self, codes: Tensor) -> None:
        self.plain: Tensor | None = codes
        self.shape, self.device = codes.shape, codes.device
        self._packed: dict[object, Tensor] = {}
        self._lock = threading.RLock()

    @property
    def codes(self) -> Tensor:
        """The weight, int8, (out, in / groups, ...): the plain one, or a new tensor."""
        with self._lock:
            return self._unpacked() if self.plain is None else self.plain

    def _unpacked(self) -> Tensor:
        packed = next(iter(self._packed.values()))
        # An ordinary tensor, which can be loaded into.
        with torch.inference_mode(False):
            dense = packed.to_dense()
            # Of a linear layer: (in, out).
            dense = dense.t() if packed.dim() == 2 else dense
            return dense.reshape(self.shape).contiguous()

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            # The process that starts reads the weight in shared memory, so it has to stay there.
            self.plain = self.codes
        return Kernel, (self.codes,)

    def move_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply what ``module.to`` does to tensors; packed copies are dropped."""
        with self._lock:
            self.plain = fn(self.codes)
            self.device = self.plain.device
            self._packed = {}

    def bind(
        self,
        shape: Sequence[int],
        weights: Int8Weights,
        params: ConvParams,
        epilogue: Epilogue,
        residual: Tensor | None = None,
    ) -> Run:
        """Return the layer as a function of codes of ``shape``, and of residuals like this one.

        ``weights`` are those of this kernel. All but the codes is looked up and converted here, as
        that takes longer than computing in small layers.
        """
        dims = len(params.stride)
        result = params.output_shape(shape, self.shape)
        if dims and min(result) < 1:
            raise InputError(
                f"Int8Conv: got an image of size {tuple(shape[2:])} with padding "
                f"{tuple(params.padding)}; expected one as large as the kernel of size "
                f"{tuple(self.shape[2:])} with dilation {tuple(params.dilation)}"
            )
        if residual is None and (dims < 3 or epilogue.activation == "none"):
            return self._run(shape, weights, params, epilogue)
        # The kernel adds tensors of the same shape, codes to codes and floats to floats.
        adds = (
            residual is not None
            and (epilogue.residual is None) == (epilogue.out is None)
            and epilogue.activation in ("none", "relu")
            and dims in (1, 2)
            and residual.shape == result
        )
        if adds:
            return self._run(shape, weights, params, epilogue, adds=True)
        run = self._run(shape, weights, params, Epilogue())
        return lambda x, residual=None: finish(run(x), epilogue, residual)

    def _run(
        self,
        shape: Sequence[int],
        weights: Int8Weights,
        params: ConvParams,
        epilogue: Epilogue,
        adds: bool = False,
    ) -> Run:
        """Return the function in a form that the kernels compute.

        It has two or three dimensions, and padding only where the zero point of the input is 0.
        """
        if len(params.stride) == 1:
            # The 1-d operator knows fewer activations than the 2-d one, and calls the same kernels.
            stride = (1, *params.stride)
            padding = (0, *params.padding)
            dilation = params.dilation
            wide = ConvParams(stride, padding, (1, *dilation), params.groups)
            flat = self._run((*shape[:2], 1, shape[2]), weights, wide, epilogue, adds)
            return lambda *tensors: flat(*(x.unsqueeze(2) for x in tensors)).squeeze(2)
        if weights.x_zero_point and any(params.padding):
            # Zeros of the image are codes of x_zero_point, of which the kernel does not know.
            border_code = float(weights.x_zero_point)
            border = [p for p in reversed(params.padding) for _ in range(2)]
            image = [
                size + 2 * p for size, p in zip(shape[2:], params.padding, strict=True)
            ]
            unpadded = params._replace(padding=(0,) * len(image))
            inner = self._run((*shape[:2], *image), weights, unpadded, epilogue, adds)
            return lambda x, *residual: inner(
                F.pad(x, border, value=border_code), *residual
            )
        return _bound(
            self._pack(shape, weights, params), weights, params, epilogue, adds
        )

    def _pack(
        self, shape: Sequence[int], weights: Int8Weights, params: ConvParams
    ) -> Tensor:
        """Return the packed weight for inputs of ``shape``, and drop the plain one.

        The layout depends on the size of the image, not on the batch. A weight in the layout of
        another size is converted at every call, which takes a hundred times longer than convolving.
        """
        codes = weights.codes
        if params.stride:
            codes = codes if codes.dim() == len(shape) else codes.unsqueeze(2)
            # The packed weight does not depend on the scales, and reading each takes time.
            packed = torch.ops.onednn.qconv_prepack(
                codes,
                weights.scale.flatten()[:1],
                1.0,
                0,
                *params.as_lists(),
                list(shape),
            )
        else:
            packed = torch.ops.onednn.qlinear_prepack(codes, None)
        # Images of most sizes ask for the same layout. One operator alone tells it.
        tell = getattr(torch.ops.mkldnn, "_get_mkldnn_serialized_md", None)
        key = tuple(shape[2:]) if tell is None else bytes(tell(packed).tolist())
        with self._lock:
            packed = self._packed.setdefault(key, packed)
            self.plain = None
            return packed


def _scale_and_bias(weights: Int8Weights) -> tuple[Tensor, Tensor | None]:
    """Return the scale of each channel, and the bias with the zero point of the input in it.

    ``sum (x - z) w = sum x w - z sum w``. Kernels without a zero point are much faster.
    """
    codes, scale, bias, x_scale, x_zero_point = weights
    scale = scale.expand(codes.shape[0]).contiguous()
    if x_zero_point:
        sums = codes.flatten(1).sum(1, dtype=torch.int64).double()
        shift = sums * scale.double() * (x_scale * x_zero_point)
        bias = (-shift if bias is None else bias.double() - shift).float()
    return scale, None if bias is None else bias.float()


@lru_cache
def _zeros(count: int) -> Tensor:
    """Return the zero points of as many channels, one tensor for all layers, which only read it."""
    return torch.zeros(count, dtype=torch.int64, device="cpu")


def _bound(
    packed: Tensor,
    weights: Int8Weights,
    params: ConvParams,
    epilogue: Epilogue,
    adds: bool,
) -> Run:
    """Return a product as a function of codes and, where it adds one, of a residual.

    Where the epilogue can, it computes in units of the resulting codes: oneDNN compiles and keeps
    a kernel for each set of numbers in its post-ops. Bounds in codes are the same numbers in most
    layers, bounds of values in none.
    """
    scale, bias = _scale_and_bias(weights)
    out = epilogue.out
    grid = (
        (1.0, 0, torch.float32)
        if out is None
        else (out.scale, out.zero_point, torch.uint8)
    )
    activation, arguments = epilogue.activation, epilogue.arguments
    bounds = None if adds else epilogue.bounds_in_codes()
    if bounds is None:
        scale = scale * weights.x_scale
    else:
        bias = None if bias is None else (bias.double() / grid[0]).float()
        scale = (scale.double() * weights.x_scale / grid[0]).float()
        grid, activation, arguments = (
            (1.0, *grid[1:]),
            "clamp" if bounds else "none",
            bounds,
        )
    # With 1 for the scale of the input. oneDNN multiplies by both in turn or at once, by its
    # version, the processor and the sizes: where there is a matrix unit small layers do not use it.
    before: Any = (1.0, 0, packed, scale, _zeros(len(scale)))
    behind: Any = (bias, *(params.as_lists() if params.stride else ()), *grid)
    if adds:
        run: Run = _adding(before, behind, epilogue, grid[2])
    else:
        operator: Any = {
            0: torch.ops.onednn.qlinear_pointwise.default,
            2: torch.ops.onednn.qconv2d_pointwise.default,
            3: torch.ops.onednn.qconv3d_pointwise.default,
        }[len(params.stride)]
        act = ACTIVATIONS[activation]
        settings = (*before, *behind, act.onednn, list(arguments), act.algorithm)

        def run(x: Tensor) -> Tensor:
            result: Tensor = operator(x, *settings)
            return result

    if bounds is not None or out is None or out.saturates_by_itself:
        return run
    return lambda *tensors: run(*tensors).clamp_(out.quant_min, out.quant_max)


def _adding(before: Any, behind: Any, epilogue: Epilogue, dtype: torch.dtype) -> Run:
    """Return the convolution that adds a residual, in place, to a copy in the output's dtype."""
    operator: Any = torch.ops.onednn.qconv2d_pointwise.binary
    of, last = epilogue.residual, torch.channels_last
    added = (1.0, 0) if of is None else (of.scale, of.zero_point)
    settings = (*behind, *added, "sum", 1.0, epilogue.activation, [], "")

    def add(x: Tensor, residual: Tensor) -> Tensor:
        target = residual.to(dtype, memory_format=last, copy=True)
        result: Tensor = operator(x, *before, target, *settings)
        return result

    return add


@lru_cache
def saturates() -> bool:
    """Return True if the kernels add two products in 16 bits, as CPUs without VNNI do.

    ``255 * 127 * 2`` does not fit 16 bits. Found by computing such a sum, so that whatever limits
    oneDNN (``ONEDNN_MAX_CPU_ISA``, an emulator) is seen.
    """
    if not available():
        return False
    x = torch.full((16, 64), 255, dtype=torch.uint8, device="cpu")
    codes = torch.full((64, 64), 127, dtype=torch.int8, device="cpu")
    scale = torch.ones(1, dtype=torch.float32, device="cpu")
    exact = 64 * 255.0 * 127.0
    for image, weight, params in (
        (x, codes, ConvParams()),
        (
            x.view(1, 64, 4, 4),
            codes.view(64, 64, 1, 1),
            ConvParams((1, 1), (0, 0), (1, 1)),
        ),
    ):
        weights = Int8Weights(weight, scale, None, 1.0, 0)
        run = Kernel(weight).bind(image.shape, weights, params, Epilogue())
        if bool((run(image) != exact).any()):
            return True
    return False
