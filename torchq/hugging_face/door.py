"""Hugging Face's own door: ``from_pretrained`` gives the quantized model, with its ranges.

transformers asks two classes of a method of quantization: a configuration, which stands in
``config.json``, and a quantizer, which ``from_pretrained`` calls before and after the weights are
loaded. Both are made when they are needed, as transformers is optional.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError, QuantizationError
from torchq.hugging_face.attention import (
    CHILD,
    attend_in_modules_,
    has_attention,
    route_attention_,
)
from torchq.nn.convert import float_name
from torchq.nn.optional_buffers import OPTIONAL
from torchq.runtime import Runtime
from torchq.swap import plan_of, quantize_
from torchq.utils.optional import import_optional
from torchq.workflow import calibrate, is_quantized, quantizers
from torchq.workflow.state import load_content, public_state

__all__ = ["embed_", "quantization_config", "register_method"]

_METHOD = "torchq"
_TARGET = "target"
_RECORD = "record"
_TENSORS = "tensors"


def register_method() -> None:
    """Let transformers know the quantization method "torchq", for this process.

    ``from_pretrained`` needs it to load a folder that holds a quantized model. Without it, it says
    that it does not know the method, and gives the float model. A second call does nothing.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    _classes()


def quantization_config(
    target: str | Runtime | None = None,
    *,
    exclude: Sequence[str] = (),
    example: object = None,
    batches: Iterable[object] = (),
) -> Any:
    """Return a ``quantization_config`` for ``from_pretrained`` of a float model.

    Args:
        target: as for :func:`torchq.quantize_`.
        exclude: as for :func:`torchq.quantize_`.
        example: as for :func:`torchq.quantize_`. It is not written to ``config.json``. With a
            target, attention is computed by modules then: see :func:`attend_in_modules_`.
        batches: as for :func:`torchq.calibrate`; without any, ranges are those of each call.

    Returns:
        An object that transformers takes.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    config_class, _ = _classes()
    return config_class(
        target=target, exclude=tuple(exclude), example=example, batches=batches
    )


def embed_(model: nn.Module) -> None:
    """Let ``save_pretrained`` of a quantized model write what ``from_pretrained`` needs, in place.

    The record is made when the model is saved, so it may be trained or changed before. The
    Trainer of transformers takes the model as one that can be trained.

    Args:
        model: of transformers, quantized.

    Raises:
        QuantizationError: The model is not quantized, or has no ``config``.
        MissingExtraError: transformers is not installed.
    """
    if not is_quantized(model) or not hasattr(model, "config"):
        raise QuantizationError(
            f"embed_: got a {float_name(model)}; expected a quantized model of transformers. "
            "Call torchq.quantize_ and torchq.calibrate first"
        )
    config_class, quantizer_class = _classes()
    config: Any = model.config
    config.quantization_config = config_class(record=plan_of(model).to_dict())
    quantizer = quantizer_class(config.quantization_config, pre_quantized=True)
    vars(model).update(
        hf_quantizer=quantizer, is_quantized=True, quantization_method=_METHOD
    )


class _Config:
    """What ``config.json`` says of a model that torchq has quantized."""

    quant_method = _METHOD

    def __init__(
        self,
        *,
        record: Any = None,
        tensors: Any = None,
        target: str | Runtime | None = None,
        exclude: Sequence[str] = (),
        example: object = None,
        batches: Iterable[object] = (),
        quant_method: str = _METHOD,
    ) -> None:
        self.quant_method = quant_method
        self.record = record
        self.tensors = tensors
        self.target = target
        self.exclude = exclude
        self.example = example
        self.batches = batches

    def to_dict(self) -> dict[str, Any]:
        """Return what is written: the record, and the shapes and types of its tensors."""
        return {
            "quant_method": self.quant_method,
            _RECORD: self.record,
            _TENSORS: self.tensors,
        }


class _Quantizer:
    """What ``from_pretrained`` and ``save_pretrained`` call."""

    requires_calibration = False
    is_trainable = True
    is_qat_trainable = True
    is_compileable = True
    quantization_config: Any
    pre_quantized: bool
    _added: list[tuple[nn.Module, str]]
    _dtype: torch.dtype | None = None

    def is_serializable(self) -> bool:
        """Return True: a folder holds the quantizers."""
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Note the type that the model is to have."""
        self._dtype = dtype
        return dtype

    def get_new_dtype(self, converter: object, param: object, dtype: object) -> None:
        """Return None: tensors are loaded as they were saved, so that ranges stay float32."""

    def get_state_dict_and_metadata(
        self, model: nn.Module
    ) -> tuple[dict[str, object], dict[str, str]]:
        """Return what is written, and bring ``config.json`` up to date."""
        plan = plan_of(model)
        if plan.fusions:
            raise QuantizationError(
                f"save_pretrained: {float_name(model)}: is fused, which from_pretrained cannot "
                "repeat; expected an unfused model. Use torchq.save and torchq.load_model"
            )
        state = public_state(model)
        paths = _quantizer_paths(model)
        names = {key: key.rpartition(".") for key in state}
        config = self.quantization_config
        config.record = plan.to_dict()
        config.tensors = {
            key: [list(value.shape), str(value.dtype).removeprefix("torch.")]
            for key, value in state.items()
            if names[key][0] in paths or names[key][2] in OPTIONAL
        }
        return state, {}

    def _process_model_before_weight_loading(
        self, model: nn.Module, **_: object
    ) -> nn.Module:
        """Add the tensors of quantizers to a float model, so that they are loaded with it."""
        self._added = []
        if self.pre_quantized:
            described = self.quantization_config.tensors
            for key, (shape, dtype) in _checked(described).items():
                self._add(model, key, torch.empty(shape, dtype=dtype, device="meta"))
        return model

    def _add(self, model: nn.Module, key: str, tensor: Tensor) -> None:
        """Register a buffer at a dotted path, in modules that are made where they lack."""
        owner = model
        *path, name = key.split(".")
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
                self._added.append((owner, part))
            owner = owner.get_submodule(part)
        owner.register_buffer(name, tensor)
        self._added.append((owner, name))

    def _process_model_after_weight_loading(
        self, model: nn.Module, **_: object
    ) -> nn.Module:
        """Quantize a model whose weights are loaded, and give it its ranges."""
        config = self.quantization_config
        if self.pre_quantized:
            tensors = model.state_dict()
            for owner, name in reversed(self._added):
                delattr(owner, name)
            if _attends_in_modules(config.record):
                route_attention_(model)
            load_content(model, config.record, tensors)
            return model.to(self._dtype)
        options = {"target": config.target, "example": config.example}
        if None not in options.values() and has_attention(model):
            attend_in_modules_(model, config.example)
        quantize_(model, exclude=list(config.exclude), progress=False, **options)
        batches = list(config.batches)
        if batches:
            calibrate(model, batches, progress=False)
        config.example = None
        config.batches = ()
        return model


def _attends_in_modules(record: object) -> bool:
    """Return True for the record of a model whose attention modules compute."""
    decisions = record.get("decisions", ()) if isinstance(record, Mapping) else ()
    names = [row.get("names") or () for row in decisions if isinstance(row, Mapping)]
    return any(str(name).endswith(f".{CHILD}") for paths in names for name in paths)


def _quantizer_paths(model: nn.Module) -> set[str]:
    """Return every path at which a quantizer stands; a shared one has several."""
    objects = {id(quantizer) for quantizer in quantizers(model).values()}
    modules = model.named_modules(remove_duplicate=False)
    return {path for path, module in modules if id(module) in objects}


def _checked(described: object) -> dict[str, tuple[list[int], torch.dtype]]:
    """Return shapes and types by name, as ``config.json`` holds them."""
    tensors: dict[str, tuple[list[int], torch.dtype]] = {}
    entries: Iterable[tuple[str, Any]] = [("", None)]
    if isinstance(described, Mapping):
        entries = described.items()
    for key, value in entries:
        try:
            shape, name = value
            dtype = getattr(torch, name)
            torch.empty(shape, dtype=dtype, device="meta")
        except (TypeError, ValueError, AttributeError, RuntimeError):
            raise ConfigError(
                f"from_pretrained: quantization_config: {_TENSORS}: {key or described!r}: got "
                f"{value!r}; expected [shape, type]. config.json is damaged, save the model again"
            ) from None
        tensors[key] = (shape, dtype)
    return tensors


@cache
def _classes() -> tuple[type, type]:
    """Return the classes of configuration and quantizer, registered at transformers."""
    needed = ("torchq.hugging_face", "integration")
    package = import_optional("transformers.quantizers", *needed)
    auto = import_optional("transformers.quantizers.auto", *needed)
    mixin = import_optional("transformers.utils.quantization_config", *needed)
    bases = (_Config, mixin.QuantizationConfigMixin)
    config = type("TorchqConfig", bases, {"__doc__": _Config.__doc__})
    parts = (_Quantizer, package.HfQuantizer)
    quantizer = type("TorchqHfQuantizer", parts, {"__doc__": _Quantizer.__doc__})
    auto.register_quantization_config(_METHOD)(config)
    auto.register_quantizer(_METHOD)(quantizer)
    return config, quantizer
