"""Saving a quantized model to a file, and loading it: all of it or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError, QuantizationError
from torchq.formats import PerTensor
from torchq.nn import QuantModule, TensorQuantizer
from torchq.nn.transaction import unchanged_on_error
from torchq.swap.apply import name_quantizers
from torchq.utils import qualified_name, replacing
from torchq.workflow.foreign_files import read_file, record_in
from torchq.workflow.modes import quantizers
from torchq.workflow.record import apply_record_, public_state, swap_record, with_all_shared

__all__ = ["load", "load_model", "save"]


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write what was quantized in ``model`` and how, and all its tensors, to one file.

    Unlike ``torch.save(model)`` the file holds no class: :func:`load` needs the float model, built
    by its own code. A file that exists is replaced as a whole, or not at all.

    Args:
        model: any module; left unchanged.
        path: the file.
    """
    data = {"torchq": swap_record(model), "state_dict": public_state(model)}
    with replacing(path) as (temporary,):
        torch.save(data, temporary)


def load_model(
    factory: Callable[[], nn.Module],
    path: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
) -> nn.Module:
    """Build a model and make it what was saved.

    Args:
        factory: called without arguments; returns the float model that was quantized.
        path: what :func:`save` wrote.
        map_location: as for :func:`load`.

    Returns:
        The model, in the training or eval mode that ``factory`` left it in.

    Raises:
        QuantizationError: See :func:`load`.
        ConfigError: See :func:`load`, or ``factory`` returns no module.
    """
    model = factory()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"load_model: factory returned a {type(model).__name__}; expected a torch.nn.Module"
        )
    return load(model, path, map_location=map_location)


def load(model: nn.Module, path: str | os.PathLike[str], *, map_location: Any = "cpu") -> nn.Module:
    """Make ``model`` what was saved: quantize its layers in place, and load all tensors.

    A model that is quantized in another way is converted, and an unfused model is fused if the
    saved one was. The file is checked as a whole before
    the model is touched, nothing in it is executed, and a call that fails changes nothing.

    Args:
        model: the architecture that was saved, float or quantized.
        path: what :func:`save` wrote; or a checkpoint of Lightning or a folder of Hugging Face's
            ``save_pretrained``, of a model that
            :func:`torchq.workflow.embed_record_` was called on.
        map_location: as for :func:`torch.load`; tensors end on the model's own device.

    Returns:
        ``model``.

    Raises:
        QuantizationError: The model is not the one that was saved.
        ConfigError: The file was not written by :func:`save`, or is damaged.
        FuseError: The model cannot be fused as the saved one was.
        OSError: The file cannot be read.
    """
    record, state, part = _unpack(model, path, read_file(path, map_location))
    with unchanged_on_error(model):
        apply_record_(part, record)
        _add_tied(model, state)
        _check_tensors(model, state)
        _check_ranges(model, state)
        _load_tensors(model, state)
        name_quantizers(model)
    return model


def _unpack(
    model: nn.Module, path: str | os.PathLike[str], data: Any
) -> tuple[Any, dict[str, Any], nn.Module]:
    """Return the record, the tensors, and the part of ``model`` that the record is about."""
    content: dict[str, Any] = data if isinstance(data, dict) else {}
    is_own = "torchq" in content
    state = content.get("state_dict", None if is_own else content)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        state = None
    if is_own:
        if state is None:
            raise ConfigError(
                f"load: {os.fspath(path)}: got no 'state_dict'; expected named tensors. The file "
                "is damaged"
            )
        return with_all_shared(data["torchq"], state), state, model
    state = {} if state is None else dict(state)
    found = record_in(state)
    if found is None:
        raise ConfigError(
            f"load: {os.fspath(path)} was not written by torchq.save; expected its 'torchq' entry, "
            "or the one of torchq.workflow.embed_record_. Use load_state_dict for a state dict"
        )
    prefix, record = found
    parts = dict(model.named_modules(remove_duplicate=False))
    inside = f"{prefix}." if prefix else ""
    record = with_all_shared(record, state, inside)
    if prefix in parts:
        return record, state, parts[prefix]
    own = {k.removeprefix(inside): v for k, v in state.items() if k.startswith(inside)}
    return record, own, model


def _add_tied(model: nn.Module, state: dict[str, Any]) -> None:
    """Add tensors that a file leaves out because they are the same as others."""
    own = model.state_dict(keep_vars=True)
    first = {id(own[key]): key for key in reversed(list(own)) if key in state}
    for key, value in own.items():
        if key not in state and id(value) in first:
            state[key] = state[first[id(value)]]


def _check_tensors(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Compare names, shapes and kinds of tensors with those of ``model``.

    Raises:
        QuantizationError: They differ.
    """
    own = model.state_dict()
    problems = [f"{key} is missing" for key in own if key not in state]
    # A quantizer adopts these factors, which only some files have.
    adopted = {f"{name}.pre_quant_scale" for name in quantizers(model)}
    problems += [f"{key} is not expected" for key in state if key not in own and key not in adopted]
    empty = [k for k in own.keys() & state.keys() if _is_meta(own[k]) and not _is_meta(state[k])]
    if empty:
        raise QuantizationError(
            f"load: {min(empty)}{f' and {len(empty) - 1} more' if len(empty) > 1 else ''}: on the "
            "meta device, where nothing can be copied; expected real tensors. Call "
            "model.to_empty(device='cpu') first, then load"
        )
    for key in own.keys() & state.keys():
        problem = _difference(own[key], state[key])
        is_range = key.endswith((".amax", ".amin", ".pre_quant_scale")) or key in ("amax", "amin")
        if problem and not (is_range and problem.startswith("has shape")):
            problems.append(f"{key} {problem}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise QuantizationError(
            f"load: {qualified_name(type(model))}: {'; '.join(sorted(problems)[:5])}{more}; "
            "expected the tensors of the model. Load into the architecture that was saved"
        )


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _difference(own: Any, given: Any) -> str:
    """Return what makes ``given`` unfit to be copied into ``own``; empty if nothing does."""
    if not isinstance(own, Tensor):  # the extra state of a module, whatever that is
        return ""
    if not isinstance(given, Tensor):
        return f"is a {type(given).__name__}, not a tensor"
    if given.layout is not torch.strided or given.is_quantized:
        return "is not a dense tensor"
    if given.is_complex() != own.is_complex():
        return f"has the type {given.dtype}, not {own.dtype}"
    if given.shape == own.shape:
        return ""
    if given.numel() * given.element_size() > given.untyped_storage().nbytes():
        # A few bytes of a file can stand for any amount of memory.
        return f"repeats its numbers to the shape {tuple(given.shape)}"
    return f"has shape {tuple(given.shape)}, not {tuple(own.shape)}"


def _check_ranges(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Check each range for its quantizer.

    Raises:
        ConfigError: A range is no floating-point tensor, negative, NaN, infinite or misshapen.
    """
    weights = {
        id(quantizer): weight
        for module in model.modules()
        if isinstance(module, QuantModule)
        for quantizer, weight in module.quantized_weights()
    }
    for path, quantizer in quantizers(model).items():
        prefix = f"{path}." if path else ""
        weight = weights.get(id(quantizer))
        problem = _range_problem(quantizer, state[f"{prefix}amax"], weight)
        if problem:
            raise ConfigError(f"load: {prefix}amax: {problem}. The file is damaged")
        amin = state.get(f"{prefix}amin")
        if amin is not None:
            problem = _range_problem(quantizer, -amin, weight)
            if problem or amin.shape != state[f"{prefix}amax"].shape:
                raise ConfigError(
                    f"load: {prefix}amin: {problem or f'got shape {tuple(amin.shape)}'}; expected "
                    "finite numbers <= 0 of the shape of amax. The file is damaged"
                )
        _check_choices(prefix, state)


def _check_choices(prefix: str, state: Mapping[str, Tensor]) -> None:
    """Check what a quantizer holds beside its range; tensors without numbers hold anything.

    Raises:
        ConfigError: The sign of the codes or the factor of the input is impossible.
    """
    sign = state.get(f"{prefix}unsigned")
    if sign is None or sign.is_meta:
        possible = True
    else:
        possible = sign.numel() == 1 and sign.item() in (-1, 0, 1)
    if sign is not None and not possible:
        raise ConfigError(
            f"load: {prefix}unsigned: got {sign.flatten()[:3].tolist()}; expected -1, 0 or 1. "
            "The file is damaged"
        )
    scale = state.get(f"{prefix}pre_quant_scale")
    if scale is not None and not scale.is_meta and not bool(torch.isfinite(scale).all()):
        raise ConfigError(
            f"load: {prefix}pre_quant_scale: got NaN or infinite values; expected finite ones. "
            "The file is damaged"
        )


def _range_problem(quantizer: TensorQuantizer, amax: Tensor, weight: Tensor | None) -> str:
    if not amax.is_floating_point():
        return f"got {amax.dtype}; expected a floating-point tensor"
    if amax.numel() == 0:
        has_range = amax.shape != (0,)
        return f"got shape {tuple(amax.shape)}; expected a range" if has_range else ""
    if amax.is_meta:
        return ""
    if not bool(((amax >= 0) & (amax <= torch.finfo(torch.float32).max)).all()):
        return "got negative, NaN or infinite values; expected finite numbers >= 0"
    granularity = quantizer.descriptor.granularity
    shape = amax.shape if weight is None else weight.shape
    try:
        if weight is not None or isinstance(granularity, PerTensor):
            granularity.align(amax, shape)
    except ConfigError as error:
        return str(error)
    return ""


def _load_tensors(model: nn.Module, state: dict[str, Any]) -> None:
    """Copy all tensors; an interruption brings the old numbers back."""
    before = {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in model.state_dict().items()
    }
    try:
        model.load_state_dict(state, strict=True)
    except BaseException as error:
        model.load_state_dict(before, strict=False)
        if isinstance(error, RuntimeError):
            raise QuantizationError(f"load: {error}") from None
        raise
