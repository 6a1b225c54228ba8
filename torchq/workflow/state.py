"""Saving a quantized model to a file, and loading it: all of it or nothing."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError, ExportError, QuantizationError
from torchq.formats import Granularity, PerTensor
from torchq.nn import TensorQuantizer
from torchq.nn.convert import unchanged_on_error
from torchq.nn.given_numbers import checked_numbers
from torchq.nn.optional_buffers import (
    CORRECTION,
    FACTORS,
    HELD,
    is_record,
    lacking_keys,
)
from torchq.swap.apply import apply_, name_quantizers, plan_of, public_path
from torchq.swap.plan import Plan
from torchq.utils import (
    deployed_part,
    network_of,
    qualified_name,
    replacing,
    undone_on_error,
    unwrapped,
)
from torchq.workflow.foreign_files import read_file, record_in
from torchq.workflow.modes import quantized_weights, quantizers

# A tensor that stands for a real one of any shape.
_ANY = torch.empty(0, device="cpu", dtype=torch.float32)
# The buffers that only some quantizers have: a loading quantizer adopts them.
_ADOPTED = tuple(buffer.name for buffer in (*FACTORS, *HELD))
_RANGE_KEYS = ("amax", "amin", *_ADOPTED)
_CORRECTIONS = tuple(buffer.name for buffer in CORRECTION)


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write what was quantized in ``model`` and how, and all its tensors, to one file.

    Unlike ``torch.save(model)`` the file holds no class: :func:`load` needs the float model, built
    by its own code. A file that exists is replaced as a whole, or not at all.

    Args:
        model: any module; left unchanged. In place of a wrapper, such as what ``torch.compile``
            returns, the module inside is written.
        path: the file.

    Raises:
        QuantizationError: The model was returned by :func:`torchq.deploy`, or traced.
        ExportError: The disk is full, or the file cannot be written for another reason.
    """
    model = network_of(model)
    with _without_wrappers(model) as inside:
        _check_loadable(inside)
        data = {"torchq": plan_of(inside).to_dict(), "state_dict": public_state(inside)}
    with replacing(path) as (temporary,):
        try:
            torch.save(data, temporary)
        # Torch's writer raises the latter on a full disk.
        except (
            OSError,
            RuntimeError,
        ) as error:
            raise ExportError(
                f"save: {os.fspath(path)}: cannot be written ({error}); expected room for the "
                "tensors of the model, and a folder that may be written to. What was there is kept"
            ) from error


@contextmanager
def _without_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the module inside ``model``, in which wrapped children are replaced for a while."""
    inside = unwrapped(model)
    wrapped = [
        (parent, name, child)
        for parent in inside.modules()
        for name, child in parent.named_children()
        if unwrapped(child) is not child
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, unwrapped(child))
    try:
        yield inside
    finally:
        for parent, name, child in wrapped:
            if getattr(parent, name) is unwrapped(child):
                setattr(parent, name, child)


def _check_loadable(model: nn.Module) -> None:
    """Refuse what :func:`load` cannot build: deployed and traced models."""
    deployed = deployed_part(model)
    if deployed is not None:
        name, module = deployed
        raise QuantizationError(
            f"save: {name}: got a {type(module).__name__} of a deployed model, which load cannot "
            "build; expected the model that was deployed. Save that one, or call "
            "torch.save(model, path)"
        )
    for name, module in model.named_modules():
        if name.endswith("_quantizer") and not isinstance(
            module, (TensorQuantizer, nn.Identity)
        ):
            raise QuantizationError(
                f"save: {name}: got a {type(module).__name__}; expected a quantizer. Save the "
                "model that was traced or exported"
            )


def load_model(
    factory: Callable[[], nn.Module],
    path: str | os.PathLike[str],
    *,
    map_location: object = "cpu",
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


def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    map_location: object = "cpu",
    example: object = None,
) -> nn.Module:
    """Make ``model`` what was saved: quantize its layers in place, and load all tensors.

    A model that is quantized in another way is converted, and an unfused model is fused if the
    saved one was. The file is checked as a whole before
    the model is touched, nothing in it is executed, and a call that fails changes nothing.

    Args:
        model: the architecture that was saved, float or quantized, with or without wrappers such
            as what ``torch.compile`` returns.
        path: what :func:`save` wrote; or a checkpoint of Lightning or a folder of Hugging Face's
            ``save_pretrained``, of a model that
            :func:`torchq.workflow.embed_record_` was called on.
        map_location: as for :func:`torch.load`; tensors end on the model's own device.
        example: the arguments for one call of the model. With it the converted model, every
            quantizer off, is compared with the float one, as :func:`torchq.quantize_` does.

    Returns:
        ``model``.

    Raises:
        QuantizationError: The model is not the one that was saved.
        ConfigError: The file was not written by :func:`save`, or is damaged.
        FuseError: The model cannot be fused as the saved one was.
        OSError: The file cannot be read.
    """
    content = read_file(path, map_location)
    with (
        _without_wrappers(network_of(model)) as inside,
        unchanged_on_error(inside),
    ):
        stored, state, part = _unpack(inside, path, content)
        apply_(part, stored, example if part is inside else None)
        _load_into_quantized(inside, state)
    return model


def load_content(
    model: nn.Module, record: object, tensors: Mapping[str, object]
) -> None:
    """Make a model what a record and tensors say, in place, as :func:`load` does with a file.

    It is for checkpoints of others, who keep both in their own way. A call that fails changes
    nothing.

    Args:
        model: the architecture that was saved.
        record: what ``plan_of(saved).to_dict()`` returned.
        tensors: those of the whole model, by the names of its state dict.

    Raises:
        QuantizationError: The model is not the one that was saved.
        ConfigError: The record or a tensor is damaged.
    """
    state = {key: value for key, value in tensors.items() if not is_record(key)}
    with unchanged_on_error(model):
        apply_(model, Plan.from_dict(record))
        _load_into_quantized(model, state)


def _load_into_quantized(model: nn.Module, state: dict[str, Any]) -> None:
    """Load all tensors, and the optional ones of quantizers, once the layers are quantized."""
    for name, quantizer in quantizers(model).items():
        for buffer in (*FACTORS, *HELD):
            if f"{name}.{buffer.name}" not in state:
                buffer.drop(quantizer, quantizer.amax)
    _add_tied(model, state)
    _check_tensors(model, state)
    _check_ranges(model, state)
    _load_tensors(model, state)
    name_quantizers(model)


def _unpack(
    model: nn.Module, path: str | os.PathLike[str], data: Any
) -> tuple[Plan, dict[str, object], nn.Module]:
    """Return the plan, the tensors, and the part of ``model`` that the plan is about."""
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
        # Files of earlier versions may hold a record among the tensors too.
        tensors = {key: value for key, value in state.items() if not is_record(key)}
        return Plan.from_dict(data["torchq"]), tensors, model
    state = {} if state is None else dict(state)
    embedded = record_in(state)
    if embedded is None:
        raise ConfigError(
            f"load: {os.fspath(path)} was not written by torchq.save; expected its 'torchq' entry, "
            "or the one of torchq.workflow.embed_record_. Use load_state_dict for a state dict"
        )
    prefix, record = embedded
    state = {key: value for key, value in state.items() if not is_record(key)}
    parts = dict(model.named_modules(remove_duplicate=False))
    inside = f"{prefix}." if prefix else ""
    stored = Plan.from_dict(record)
    if prefix in parts:
        return stored, state, parts[prefix]
    inner_state = {
        k.removeprefix(inside): v for k, v in state.items() if k.startswith(inside)
    }
    return stored, inner_state, model


def public_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``model``, with legacy layers as torchq's own would have it.

    What :func:`torchq.workflow.embed_record_` adds to state dicts is not in it.
    """
    state: dict[str, Any] = model.state_dict()
    # Not copied, as it holds the versions of classes, which a copy would lack.
    for key in list(filter(is_record, state)):
        del state[key]
    for path, quantizer in quantizers(model).items():
        public = public_path(path)
        if public == path:
            continue
        ranges = {"amax": quantizer.amax, "pre_quant_scale": quantizer.pre_quant_scale}
        for name, tensor in ranges.items():
            state.pop(f"{path}._{name}", None)
            if tensor is not None:
                state[f"{public}.{name}"] = tensor.detach()
        state.setdefault(f"{public}.amax", torch.empty(0, device="cpu"))
    return state


def _add_tied(model: nn.Module, state: dict[str, object]) -> None:
    """Add tensors that a file leaves out because they are the same as others."""
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensors[key]): key for key in reversed(list(tensors)) if key in state}
    for key, value in tensors.items():
        if key not in state and id(value) in first:
            state[key] = state[first[id(value)]]


def _check_tensors(model: nn.Module, state: Mapping[str, object]) -> None:
    """Compare names, shapes and kinds of tensors with those of ``model``."""
    expected = model.state_dict()
    names = {key: key.rpartition(".")[2] for key in expected}
    expected = {key: value for key, value in expected.items() if not is_record(key)}
    problems = [
        f"{k} is missing"
        for k in expected
        if k not in state and names[k] not in _CORRECTIONS
    ]
    owners = {key.rpartition(".")[0] for key in expected if names[key] in _CORRECTIONS}
    for owner in sorted(owners):
        lacking = lacking_keys(CORRECTION, state, f"{owner}." if owner else "")
        problems += [f"{key} is missing" for key in lacking]
    # A quantizer that stands in several places has its buffers under each of their names.
    adopted = {
        f"{name}.{buffer}"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, TensorQuantizer)
        for buffer in _ADOPTED
    }
    problems += [
        f"{key} is not expected"
        for key in state
        if key not in expected and key not in adopted
    ]
    empty = [
        k
        for k in expected.keys() & state.keys()
        if _is_meta(expected[k]) and not _is_meta(state[k])
    ]
    if empty:
        raise QuantizationError(
            f"load: {min(empty)}{f' and {len(empty) - 1} more' if len(empty) > 1 else ''}: on the "
            "meta device, where nothing can be copied; expected real tensors. Call "
            "model.to_empty(device='cpu') first, then load"
        )
    factors = {key: value for key, value in state.items() if key in adopted}
    for key in expected.keys() & state.keys() | factors.keys():
        problem = _difference(expected.get(key, _ANY), state[key])
        may_grow = key.rpartition(".")[2] in (*_RANGE_KEYS, *_CORRECTIONS)
        if problem and not (may_grow and problem.startswith("has shape")):
            problems.append(f"{key} {problem}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise QuantizationError(
            f"load: {qualified_name(type(model))}: {'; '.join(sorted(problems)[:5])}{more}; "
            "expected the tensors of the model. Load into the architecture that was saved; "
            "transformers 5 keeps the names of tensors with "
            "save_pretrained(folder, save_original_format=False)"
        )


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _difference(own: object, given: object) -> str:
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
    """Raise ConfigError for tensors of quantizers that no calibration gives."""
    weights = {id(quantizer): weight for quantizer, weight in quantized_weights(model)}
    layers = {id(getattr(m, "input_quantizer", None)): m for m in model.modules()}
    for path, quantizer in quantizers(model).items():
        prefix = f"{path}." if path else ""
        names = (*_RANGE_KEYS, "unsigned")
        stored = {
            name: state[prefix + name] for name in names if prefix + name in state
        }
        stored = {name: value for name, value in stored.items() if not value.is_meta}
        key = id(quantizer)
        for name in stored:
            problem = _problem(
                quantizer, name, stored, layers.get(key), weights.get(key)
            )
            if problem:
                raise ConfigError(
                    f"load: {prefix}{name}: {problem}. The file is damaged"
                )


def _problem(
    quantizer: TensorQuantizer,
    name: str,
    own: Mapping[str, Tensor],
    layer: nn.Module | None,
    weight: Tensor | None,
) -> str:
    """Return what is wrong with one tensor of a quantizer; empty if nothing is."""
    value = own[name]
    if name == "pre_quant_scale":
        return _factor_problem(layer, value)
    if name == "unsigned":
        is_sign = value.numel() == 1 and value.item() in (-1, 0, 1)
        return (
            ""
            if is_sign
            else f"got {value.flatten()[:3].tolist()}; expected -1, 0 or 1"
        )
    try:
        if name in ("amax", "amin"):
            _check_end(quantizer, name, own, weight)
        elif "held_scale" not in own or (
            ("held_zero_point" in own) == quantizer.descriptor.symmetric
        ):
            return "got a scale or a zero point alone; expected both"
        else:
            point = own.get("held_zero_point")
            TensorQuantizer(quantizer.descriptor).set_qparams(own["held_scale"], point)
    except ConfigError as error:
        return str(error)
    return ""


def _is_unknown(value: Tensor, granularity: Granularity, weight: Tensor | None) -> bool:
    """Return True for an end of a range that is not known yet: see TensorQuantizer.expect_range."""
    if value.shape == (0,):
        return True
    if weight is not None:
        return value.shape == (0, *granularity.amax_shape(weight.shape))
    return value.shape[:1] == (0,) and not isinstance(granularity, PerTensor)


def _check_end(
    quantizer: TensorQuantizer,
    name: str,
    own: Mapping[str, Tensor],
    weight: Tensor | None,
) -> None:
    """Raise ConfigError for an end of a range that no calibration gives."""
    value = own[name]
    granularity = quantizer.descriptor.granularity
    if value.shape != own.get("amax", value).shape:
        raise ConfigError(f"got shape {tuple(value.shape)}; expected that of amax")
    if _is_unknown(value, granularity, weight):
        return
    checked_numbers("range", name, value, value.device)
    if weight is not None or isinstance(granularity, PerTensor):
        granularity.align(value, value.shape if weight is None else weight.shape)


def _factor_problem(layer: nn.Module | None, factors: Tensor) -> str:
    """Return what makes factors unfit to multiply the input of ``layer``; empty if nothing does."""
    if not bool(((factors > 0) & (factors < torch.inf)).all()):
        return "got zero, negative, NaN or infinite values; expected finite numbers > 0"
    weight = getattr(layer, "weight", None)
    count = getattr(layer, "in_features", getattr(layer, "in_channels", None))
    if not isinstance(weight, Tensor) or not isinstance(count, int):
        return "" if factors.numel() else "got an empty tensor; expected factors"
    channels = (count, *(1 for _ in weight.shape[2:]))
    try:
        fits = torch.broadcast_shapes(factors.shape, channels).numel() == count
    except RuntimeError:
        fits = False
    return (
        ""
        if fits
        else f"got shape {tuple(factors.shape)}; expected one factor, or {channels}"
    )


def _load_tensors(model: nn.Module, state: dict[str, object]) -> None:
    """Copy all tensors; an interruption brings the old numbers back."""
    tensors = model.state_dict(keep_vars=True).values()
    # Names and shapes are those of the model, and so are the versions of its classes, which some
    # ask for: a state dict holds them beside its tensors.
    versioned = model.state_dict()
    for key in versioned.keys() - state.keys():
        del versioned[key]
    versioned.update(state)
    try:
        with undone_on_error(
            model, written=[t for t in tensors if isinstance(t, Tensor)]
        ):
            model.load_state_dict(versioned, strict=True)
    except RuntimeError as error:
        raise QuantizationError(f"load: {error}") from None
