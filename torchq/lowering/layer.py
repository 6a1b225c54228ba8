"""The bases of the layers of deployed models, and the checks of their inputs."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchq.errors import QuantizationError
from torchq.lowering.definition import Epilogue, Int8Weights
from torchq.lowering.onednn import Run
from torchq.lowering.operators import kernel
from torchq.lowering.packed import KERNELS, MOST_SHAPES, drop_oldest
from torchq.lowering.qparams import QParams
from torchq.lowering.release_weights import ReleasableWeightMixin
from torchq.utils import calls_are_recorded

#: The dtypes that float layers accept under autocast.
_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def eager(x: Tensor) -> bool:
    """Return True if a kernel may be called directly with its arguments bound.

    Going past torch's dispatcher saves half of a small layer's time. ``torch.jit.trace`` needs the
    dispatcher: it cannot write down the arguments of oneDNN's operators.
    """
    return not calls_are_recorded() and type(x) is Tensor and x.is_cpu


def require_dtype(x: Tensor, dtype: torch.dtype | None, where: str) -> None:
    """Refuse an input that the simulation, a float layer of ``dtype``, would refuse."""
    if dtype is None:
        if not x.dtype.is_floating_point:
            raise TypeError(f"{where}: got a tensor of {x.dtype}; expected a floating-point tensor")
        return
    if x.dtype is dtype:
        return
    if x.dtype in _AUTOCAST_DTYPES and torch.is_autocast_enabled(x.device.type):
        return
    raise TypeError(
        f"{where}: got a tensor of {x.dtype}; expected {dtype}. Convert it with x.to({dtype})"
    )


def smallest_value(x: Tensor, dtype: torch.dtype | None, where: str) -> float:
    """Return the smallest value of an input that is to be quantized.

    Looking for it takes a quarter of the time of quantizing. It is not looked for where a program
    is compiled or exported, or on GPUs, which would have to be waited for; then it is -inf.
    """
    require_dtype(x, dtype, where)
    if not eager(x) or not x.numel():
        return -math.inf
    smallest = float((x.detach() if x.requires_grad else x).amin())
    if math.isnan(smallest):
        raise QuantizationError(
            f"{where}: got NaN; expected numbers, as no uint8 code stands for NaN. "
            "Look for the operation that makes it"
        )
    return smallest


class KernelCacheMixin(nn.Module):
    """Mixin for modules that keep what they derive from their attributes and tensors.

    Derived are kernels with their arguments bound, and larger tables. There is one rule: whatever
    changes a module (assigning any attribute, loading a state dict, moving it) drops all of them.
    Copies and files do without them, since packed tensors can be neither copied nor saved.
    """

    _kernels: dict[Any, Any]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._drop_kernels()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._drop_kernels()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernels": {}}

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._drop_kernels()  # the tensors were copied into in place

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._drop_kernels()
        return self

    def bound(self, *inputs: Any) -> Run | None:
        """Return the module as a function of inputs like these, for :mod:`..graph.bound_graph`.

        The function computes what the module does for any inputs, and is fast for those of the
        same shapes. It is current until the module drops its kernels.
        """
        return None

    def _drop_kernels(self) -> None:
        """Drop everything derived, as something that it was made from has changed."""
        self.__dict__["_kernels"] = dict[Any, Any]()

    def _kernel(self, key: Any, build: Callable[[], Any]) -> Any:
        """Return what ``build`` returned for ``key``, which is called once."""
        kernels = self._kernels
        found = kernels.get(key)
        if found is None:
            drop_oldest(kernels, MOST_SHAPES)
            found = kernels[key] = build()
        return found


def guarded(run: Run, module: nn.Module, inputs: Sequence[Tensor]) -> Run:
    """Return ``run`` for inputs like these, and the module for other shapes and residuals."""
    shape = inputs[0].shape

    def call(x: Tensor) -> Tensor:
        result: Tensor = run(x) if x.shape == shape else module(x)
        return result

    if len(inputs) == 1:
        return call
    added_shape, added_dtype = inputs[1].shape, inputs[1].dtype

    def call_and_add(x: Tensor, residual: Tensor) -> Tensor:
        alike = x.shape == shape and residual.shape == added_shape
        add = run if alike and residual.dtype is added_dtype else module
        result: Tensor = add(x, residual)
        return result

    return call_and_add


#: The key of the layer that reads non-negative input; see :meth:`Int8Layer.input_codes`.
_UNSIGNED = "unsigned"


class Float32ParamsMixin(nn.Module):
    """Mixin for modules whose scales stay float32 when the model is converted to another dtype.

    ``model.to(torch.bfloat16)`` changes the dtype of floating-point results alone.

    Attributes:
        dtype: the dtype of floating-point results.
    """

    dtype: torch.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {
            name: buffer
            for name, buffer in self.named_buffers(recurse=False)
            if buffer.dtype is torch.float32
        }
        super()._apply(fn, recurse)
        self.dtype = fn(torch.zeros(0, dtype=self.dtype, device="cpu")).dtype
        for name, buffer in kept.items():
            now = self.get_buffer(name)
            if now.dtype is not torch.float32:
                setattr(self, name, buffer.to(now.device))
        return self


class IntegerModule(nn.Module):
    """Base of modules that read or return uint8 codes in a lowered graph.

    Passes know such a module by this class alone: :meth:`propagate_qparams` tells them what its
    codes stand for. Every result is a new tensor, which shares memory with no input.
    """

    def propagate_qparams(self, inputs: Sequence[QParams | None]) -> QParams | None:
        """Accept the quantization parameters of the inputs and return those of the output.

        Called in the order of the graph after a pass has moved clamps, which may move the zero
        point of the codes that this module reads. The module updates itself.
        """
        raise NotImplementedError


class QParamsStateMixin(nn.Module):
    """Mixin for modules whose quantization parameters are part of their state dict.

    Attributes:
        qparams_names: the attributes that hold a :class:`QParams` or None.
    """

    qparams_names: ClassVar[tuple[str, ...]]

    def get_extra_state(self) -> dict[str, Any]:
        """Return the quantization parameters as plain numbers, for the state dict."""
        qparams = {name: getattr(self, name) for name in self.qparams_names}
        return {name: None if q is None else astuple(q) for name, q in qparams.items()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        for name in self.qparams_names:
            setattr(self, name, None if state[name] is None else QParams(*state[name]))


class DeployedLayer(KernelCacheMixin, Float32ParamsMixin):
    """Base of layers with a quantized weight."""

    weight_codes: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self, weight_codes: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.register_buffer("weight_codes", weight_codes)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:
        """A new tensor with the weight as floating point, for code that reads a layer's weight."""
        codes = self.weight_codes
        scale = self.weight_scale.view(-1, *[1] * (codes.dim() - 1))
        return (codes * scale).to(self.dtype)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        KERNELS.forget(self.weight_codes)  # its values were copied into in place

    def _size(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())


class Int8Layer(ReleasableWeightMixin, DeployedLayer, QParamsStateMixin, IntegerModule):
    """Base of layers with int8 weights and uint8 activations.

    The input is a floating-point tensor, which the layer quantizes, or uint8 codes where
    :attr:`reads_codes` says so. The result is a floating-point tensor, or codes where the layer has
    :attr:`output_qparams`. For inference; there is no gradient.

    Args:
        weight: int8, (out, in / groups, ...).
        weight_scale: float32, (out,): real weight = weight * scale.
        bias: floating point (out,) or None.
        input_qparams: how the input is quantized.
        dtype: of floating-point results.
        pre_quant_scale: multiplies the input before it is quantized, or None.

    Attributes:
        activation: the name of the activation that is applied to the result, one of
            :data:`~torchq.lowering.definition.ACTIVATIONS`.
        arguments: the arguments of the activation.
        reads_codes: True where the input is codes of :attr:`input_qparams`. Without it uint8 is
            refused like any other integer dtype: it could be an image.
        output_qparams: None for floating-point results.
        residual_qparams: of the second argument of :meth:`forward`, where that is codes.
    """

    #: Which operator runs, for the summary.
    qparams_names = ("input_qparams", "output_qparams", "residual_qparams")
    pre_quant_scale: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        input_qparams: QParams,
        dtype: torch.dtype,
        pre_quant_scale: Tensor | None,
    ) -> None:
        bias = None if bias is None else bias.detach().to(torch.float32)
        super().__init__(weight, weight_scale, bias, dtype)
        self.register_buffer("pre_quant_scale", pre_quant_scale)
        self.input_qparams, self.reads_codes = input_qparams, False
        self.output_qparams: QParams | None = None
        self.residual_qparams: QParams | None = None
        self.activation, self.arguments = "none", list[float]()

    def propagate_qparams(self, inputs: Sequence[QParams | None]) -> QParams | None:
        """See :meth:`IntegerModule.propagate_qparams`; the second input is the residual."""
        own, residual = (*inputs, None, None)[:2]
        if own is not None:
            self.input_qparams, self.reads_codes = own, True
        if residual is not None:
            self.residual_qparams = residual
        return self.output_qparams

    def input_codes(self, x: Tensor) -> tuple[Int8Layer, Tensor]:
        """Return the layer that computes ``x``, and the codes of ``x`` that it reads.

        An input on a signed range may hold no negative number: a layer behind ReLU with the
        default configuration. Then a twin of this layer with codes that start at 0 computes the
        same, without a zero-point correction in the bias, which costs bits of it, and without
        padding by the zero point. Looking at ``x`` takes less time than either.

        Args:
            x: floating point.

        Raises:
            TypeError: ``x`` has another dtype than the layer; the simulation refuses it too.
            QuantizationError: ``x`` holds NaN, see :func:`smallest_value`.
        """
        smallest = smallest_value(x, self.dtype, type(self).__name__)
        layer: Int8Layer = self
        if smallest >= 0 and self.input_qparams.zero_point and self.pre_quant_scale is None:
            layer = self._kernel(_UNSIGNED, self._make_unsigned)
        return layer, layer._quantize(x)  # noqa: SLF001

    def _make_unsigned(self) -> Int8Layer:
        twin = self.variant()
        twin.input_qparams = self.input_qparams.clamped(0.0, math.inf)
        vars(twin)["_owner"] = weakref.ref(self)
        return twin

    def _bound(self, run: Run) -> Run:
        """Return a bound kernel that finishes its results; the plain weight is dropped now."""
        owner = vars(self).get("_owner", lambda: None)()
        for layer in (self, owner):
            if layer is not None:
                layer.drop_weight()
        return run if self.finished else lambda *tensors: self.finish(run(*tensors))

    def release_weight(self) -> int:
        """See :meth:`ReleasableWeightMixin.release_weight`; the twin shares the weight."""
        for twin in self._kernels.values():
            if isinstance(twin, Int8Layer):
                twin.release_weight()
        return super().release_weight()

    def _size(self) -> int:
        if not self.released_bytes():
            return super()._size()
        others = (buffer for buffer in self._other_buffers().values() if buffer is not None)
        return self.released_bytes() + sum(b.numel() * b.element_size() for b in others)

    def codes(self, x: Tensor) -> Tensor:
        """Return a floating-point ``x`` as codes of :attr:`input_qparams`.

        Raises:
            TypeError: see :meth:`input_codes`.
            QuantizationError: see :meth:`input_codes`.
        """
        smallest_value(x, self.dtype, type(self).__name__)
        return self._quantize(x)

    def _quantize(self, x: Tensor) -> Tensor:
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        return self.input_qparams.quantize(x)

    def int8_weights(self) -> Int8Weights:
        """Return the weights and what the input's codes stand for, as kernels take them."""
        qparams = self.input_qparams
        return Int8Weights(
            self.weight_codes, self.weight_scale, self.bias, qparams.scale, qparams.zero_point
        )

    def epilogue(self) -> Epilogue:
        """Return what kernels do with their sums."""
        out, residual = self.output_qparams, self.residual_qparams
        return Epilogue(
            1.0 if out is None else out.scale,
            0 if out is None else out.zero_point,
            torch.float32 if out is None else torch.uint8,
            self.activation,
            tuple(self.arguments),
            1.0 if residual is None else residual.scale,
            0 if residual is None else residual.zero_point,
        )

    @property
    def finished(self) -> bool:
        """True where results of the kernel have the right dtype and bounds already."""
        qparams = self.output_qparams
        if qparams is None:
            return self.dtype is torch.float32
        if self.activation == "clamp" and not qparams.saturates_by_itself:
            low, high = qparams.bounds
            return self.arguments[0] >= low and self.arguments[1] <= high
        return qparams.saturates_by_itself

    def finish(self, y: Tensor) -> Tensor:
        """Give floating-point results their dtype, and codes the bounds that no kernel knows."""
        if self.finished:
            return y
        qparams = self.output_qparams
        if qparams is None:
            return y.to(self.dtype)
        return y.clamp_(qparams.quant_min, qparams.quant_max)

    def variant(self) -> Int8Layer:
        """Return a second layer on the same tensors, for another place in a model."""
        twin = copy.copy(self)
        twin._buffers = dict(twin._buffers)
        return twin

    def get_extra_state(self) -> dict[str, Any]:
        """Return the settings that are no tensors, for the state dict."""
        activation = {"activation": self.activation, "arguments": list(self.arguments)}
        return super().get_extra_state() | activation

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        super().set_extra_state(state)
        self.activation, self.arguments = state["activation"], list(state["arguments"])

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`.

        The note says what is fused, and why the reference kernel runs where it does.
        """
        fused = [] if self.activation == "none" else [self.activation]
        if self.residual_qparams is not None:
            fused.append("add")
        out = "uint8" if self.output_qparams is not None else str(self.dtype).removeprefix("torch.")
        name, problem = kernel(self.weight_codes.device)
        note = "; ".join(filter(None, (" + ".join(fused), problem)))
        return f"{name} uint8 x int8 -> {out}", self._size(), note

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        shape = "x".join(map(str, self.weight_codes.shape))
        out = self.dtype if self.output_qparams is None else self.output_qparams
        activation = f"{self.activation}{self.arguments or ''}"
        return f"weight={shape}, input={self.input_qparams}, output={out}, activation={activation}"
