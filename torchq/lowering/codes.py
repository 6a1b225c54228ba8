"""The modules of a deployed graph that read or return uint8 codes, and the base of all of them."""

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.errors import ExportError, QuantizationError
from torchq.lowering.kernel import (
    MOST_SHAPES,
    ConvParams,
    Epilogue,
    Int8Weights,
    Kernel,
    Run,
    available,
)
from torchq.lowering.qparams import ByteQParams
from torchq.utils import calls_are_recorded

#: The dtypes that float layers accept under autocast.
_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_kernels(x: Tensor) -> bool:
    """Return True if a tensor is where kernels are; refuse calls that are recorded."""
    if calls_are_recorded():
        raise ExportError(
            "deploy: got a deployed model inside torch.compile, torch.export or torch.jit.trace; "
            "expected a call of the model itself, as nothing records its kernels. Compile or "
            "export the simulation"
        )
    return x.is_cpu


def require_dtype(x: Tensor, dtype: torch.dtype | None, where: str) -> None:
    """Refuse an input that the simulation, a float layer of ``dtype``, would refuse."""
    if x.dtype is dtype or (dtype is None and x.dtype.is_floating_point):
        return
    if x.dtype in _AUTOCAST_DTYPES and torch.is_autocast_enabled(x.device.type):
        return
    expected = dtype or "a floating-point tensor"
    raise TypeError(
        f"{where}: got a tensor of {x.dtype}; expected {expected}. Convert it with "
        f"x.to({dtype or torch.float32})"
    )


def require_numbers(x: Tensor, dtype: torch.dtype | None, where: str) -> None:
    """Refuse NaN too, for which there is no code.

    Looking for it takes a quarter of the time of quantizing; nobody looks on GPUs, which would have
    to be waited for.
    """
    require_dtype(x, dtype, where)
    if has_kernels(x) and x.numel() and math.isnan(float(x.detach().amin())):
        raise QuantizationError(
            f"{where}: got NaN; expected numbers, as no uint8 code stands for NaN. "
            "Look for the operation that makes it"
        )


class CodesModule(nn.Module):
    """Base of the modules of deployed models.

    A module keeps its kernels, bound for the shapes of inputs. There is one rule: whatever changes
    the module (assigning any attribute, loading a state dict, moving it) drops all of them. Copies
    and files do without them. ``model.to(dtype)`` changes :attr:`dtype` and leaves float32 scales.
    Every result is a new tensor, which shares memory with no input.

    Attributes:
        dtype: of floating-point inputs and results; None where any will do.
        is_new: results share memory with no input; :func:`torchq.graph.operators.may_alias`.
        qparams_names: the attributes that hold a :class:`ByteQParams` or None, parts of the state.
    """

    is_new: ClassVar[bool] = True
    qparams_names: ClassVar[tuple[str, ...]] = ()
    dtype: torch.dtype | None = None
    _runs: dict[object, Run]

    def __init__(self) -> None:
        super().__init__()
        vars(self)["_runs"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        vars(self)["_runs"] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_runs": {}}

    def _load_from_state_dict(self, *args: object) -> None:
        super()._load_from_state_dict(*args)
        vars(self)["_runs"] = {}  # the tensors were copied into in place

    def _apply(self, fn: Any, recurse: bool = True) -> object:
        def move(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            return moved if moved.dtype is tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)
        if self.dtype is not None:
            self.dtype = fn(torch.zeros(0, dtype=self.dtype, device="cpu")).dtype
        vars(self)["_runs"] = {}
        return self

    def _keep(self, key: object, run: Run) -> Run:
        """Keep the kernel that is bound for ``key``, and return it."""
        if len(self._runs) >= MOST_SHAPES:
            self._runs.clear()
        self._runs[key] = run
        return run

    def get_extra_state(self) -> dict[str, Any]:
        """Return the quantization parameters as plain numbers, for the state dict."""
        qparams = {name: getattr(self, name) for name in self.qparams_names}
        return {name: None if q is None else astuple(q) for name, q in qparams.items()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        for name in self.qparams_names:
            setattr(
                self, name, None if state[name] is None else ByteQParams(*state[name])
            )

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        return " -> ".join(str(getattr(self, name)) for name in self.qparams_names)


class Quantize(CodesModule):
    """Quantization of a floating-point tensor to uint8 codes.

    Attributes:
        finite: no value can be NaN, as all of them are made from codes; nobody looks for it.
    """

    qparams_names = ("qparams",)
    finite = False

    def __init__(self, qparams: ByteQParams, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.qparams, self.dtype = qparams, dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return the codes of ``x``, of the same shape."""
        if not (self.finite and x.dtype is torch.float32):
            require_numbers(x, self.dtype, "Quantize")
        return self.qparams.quantize(x)


class Dequantize(CodesModule):
    """Dequantization of uint8 codes to a floating-point tensor of ``dtype``."""

    qparams_names = ("qparams",)

    def __init__(self, qparams: ByteQParams, dtype: torch.dtype) -> None:
        super().__init__()
        self.qparams, self.dtype = qparams, dtype

    def forward(self, codes: Tensor) -> Tensor:
        """Return the values of ``codes``, of the same shape."""
        return self.qparams.dequantize(codes).to(self.dtype)


class CodesMaxPool2d(CodesModule):
    """Max pooling of uint8 codes (N, C, H, W) or (C, H, W); exact, as rounding keeps the order."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        window = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
        self.window: Any = (*map(_pair, window), pool.ceil_mode)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the largest code of each window."""
        # torch's own max_pool2d refuses uint8 images that are channels last. This operator for
        # quantized tensors takes plain ones as well and is ten times faster.
        if not (has_kernels(codes) and codes.numel() and codes.dim() == 4):
            size, stride, padding, dilation, ceil_mode = self.window
            pooled = F.max_pool2d(
                codes.float(), size, stride, padding, dilation, ceil_mode
            )
            return pooled.to(torch.uint8)
        channels = codes.shape[1]
        last = torch.channels_last
        missing = -channels % 32  # the channels that the kernel computes at once
        if not missing or not codes.is_contiguous(memory_format=last):
            return torch.ops.quantized.max_pool2d(codes, *self.window)
        # Channels that are left over are computed one by one: five times slower than padding.
        padded = F.pad(codes, [0, 0, 0, 0, 0, missing])
        pooled = torch.ops.quantized.max_pool2d(padded, *self.window)
        return pooled[:, :channels].contiguous(memory_format=last)


class CodesAvgPool2d(CodesModule):
    """Average pooling of uint8 codes (N, C, H, W) or (C, H, W) to other quantization parameters.

    Computed as a depthwise convolution with weights of one: one kernel adds integers and rounds
    once, where floating point takes three passes over memory. What a convolution cannot express
    (windows of different sizes, padding that is not counted) is computed in floating point.
    """

    qparams_names = ("input_qparams", "output_qparams")

    def __init__(
        self,
        pool: nn.AvgPool2d | nn.AdaptiveAvgPool2d,
        input_qparams: ByteQParams,
        output_qparams: ByteQParams,
    ) -> None:
        super().__init__()
        self.pool, self.input_qparams, self.output_qparams = (
            pool,
            input_qparams,
            output_qparams,
        )

    def forward(self, codes: Tensor) -> Tensor:
        """Return the code of each window's average."""
        if not has_kernels(codes):
            return self._float(codes)
        shape = codes.shape
        return (self._runs.get(shape) or self._keep(shape, self._bind(shape)))(codes)

    def _float(self, codes: Tensor) -> Tensor:
        return self.output_qparams.quantize(
            self.pool(self.input_qparams.dequantize(codes))
        )

    def _bind(self, shape: torch.Size) -> Run:
        fits = len(shape) == 4 and shape.numel() and available()
        window = self._window(shape[2:]) if fits else None
        if window is None:
            return self._float
        size, stride, padding = window
        before = self.input_qparams
        channels = shape[1]
        ones = torch.ones(channels, 1, *size, dtype=torch.int8, device="cpu")
        scale = torch.full(
            (channels,), 1 / math.prod(size), dtype=torch.float32, device="cpu"
        )
        weights = Int8Weights(ones, scale, None, before.scale, before.zero_point)
        params = ConvParams(tuple(stride), tuple(padding), (1, 1), channels)
        return Kernel(ones).bind(shape, weights, params, Epilogue(self.output_qparams))

    def _window(
        self, sizes: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]] | None:
        """Return size, stride and padding of windows that are all alike, or None."""
        pool = self.pool
        if isinstance(pool, nn.AdaptiveAvgPool2d):
            pairs = zip(_pair(pool.output_size), sizes, strict=True)
            out = [size if want is None else want for want, size in pairs]
            if any(
                not want or size % want for size, want in zip(sizes, out, strict=True)
            ):
                return None
            window = [size // want for size, want in zip(sizes, out, strict=True)]
            return window, window, [0, 0]
        padding = _pair(pool.padding)
        counts_all = pool.count_include_pad or not any(padding)
        if pool.ceil_mode or pool.divisor_override is not None or not counts_all:
            return None
        return _pair(pool.kernel_size), _pair(pool.stride), padding


def _pair(value: object) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value, value]
