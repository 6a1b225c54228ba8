"""From a calibrated model to one on integer kernels of torch, which ``torchq.deploy`` calls."""

import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.utils import prune, remove_spectral_norm, remove_weight_norm

from torchq import utils
from torchq.errors import ExportError
from torchq.graph import (
    STORES_VALUES,
    call_arguments,
    forward_hook_kind,
    is_torch_leaf,
    trace_or_none,
)
from torchq.lowering.attention import DeployedMultiheadAttention
from torchq.lowering.calls import ProductCall, lower_calls_
from torchq.lowering.check import ReferenceCheck
from torchq.lowering.eligible import FLOAT_INPUT, lower
from torchq.lowering.fuse import fuse_graph
from torchq.lowering.kernel import saturates
from torchq.lowering.layer import DynamicInt8Linear, Int8Layer
from torchq.lowering.qparams import SIGNED_ZERO_POINT
from torchq.lowering.state import sets_attributes
from torchq.lowering.traced import TracedModel, copy_plain_attributes
from torchq.nn import QuantModule, TensorQuantizer
from torchq.nn.calls.modules import RoutedModule
from torchq.nn.convert import float_name
from torchq.swap import restore_
from torchq.swap.even_channels import give_numbers_of_files_
from torchq.workflow import freeze_, quantizers

log = logging.getLogger(__name__)

#: What the progress bar shows.
_STAGES = ("replace layers", "fuse", "compare")
#: The layers of torchq that stay single calls.
_LAYERS = (Int8Layer, DeployedMultiheadAttention, ProductCall, TensorQuantizer)
_OVERFLOW = (
    "this CPU has no VNNI instructions, its kernels add pairs of products in 16 bits and can "
    "overflow, with large errors. Quantize with torchq.recipes.int8(reduce_range=True)"
)


def lower_model(
    simulated: nn.Module,
    example: object = None,
    *,
    fuse: bool = True,
    progress: bool = False,
    checks: Iterable[ReferenceCheck] = (),
    with_state: Iterable[str] = (),
) -> nn.Module:
    """Return a model on integer kernels that computes what ``simulated`` does.

    Args:
        simulated: a calibrated model.
        example: arguments of one call; None where there is none.
        fuse: trace what can be traced, and fuse layers there.
        progress: show a bar.
        checks: what the model is compared with.
        with_state: paths of modules that keep something from call to call, which stay as they are.
    """
    with utils.progress_stages("deploy", _STAGES, enabled=progress) as next_stage:
        result = _replace_layers(
            give_numbers_of_files_(utils.copy_module(simulated)),
            example,
        )
        next_stage()
        if fuse:
            stateful = _with_state(result, with_state, example)
            result = fuse_layers(
                result, example is None or not _gives_options(result, example), stateful
            )
        next_stage()
        overflow = any(map(_overflows, result.modules())) and saturates()
        if overflow:
            warnings.warn(f"deploy: {_OVERFLOW}", stacklevel=4)
        for check in checks:
            computes = True
            try:
                problem, note = check(result)
            # A graph may do what the model's own code would not.
            except Exception as error:
                problem = f"the deployed model raises {type(error).__name__}: {error}"
                note = ""
                computes = False
            _report(problem, note, fuse, overflow and computes)
        return result


def simulated_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a calibrated model with fixed ranges, in eval mode and without gradients.

    Wrappers of torch, such as those of data parallelism and ``torch.compile``, are left out.
    """
    _require_calibrated(model)
    simulated = _copy(utils.unwrapped(model))
    # From the inside out, as one wrapper may hold another.
    for path, module in reversed(list(simulated.named_modules(remove_duplicate=False))):
        if (inside := utils.unwrapped(module)) is not module:
            utils.set_submodule(simulated, path, inside)
    freeze_(simulated)
    return simulated.eval().requires_grad_(False)


def float_copy(simulated: nn.Module) -> nn.Module:
    """Return a copy of a model as it was before it was quantized."""
    result = utils.copy_module(simulated)
    restore_(result)
    for quantizer in quantizers(result).values():  # that the author of the model placed
        quantizer.mode = "off"
    return result


def _report(problem: str, note: str, fuse: bool, overflow: bool) -> None:
    """Raise an error or warn if the deployed model differs from the simulation."""
    if problem:
        keep = ". Pass target=torchq.runtimes.Torch(fuse=False) to keep the forward of every module"
        advice = keep if fuse else ""
        if overflow:
            advice = f". The likely reason is that {_OVERFLOW}; check=False allows it"
        raise ExportError(f"deploy: {problem}{advice}")
    if note:
        warnings.warn(
            f"deploy: {note}: the model amplifies values that are rounded the other way "
            "at a tie. Its quantized results depend on the machine that computes them",
            stacklevel=5,
        )


def _require_calibrated(model: nn.Module) -> None:
    if not any(isinstance(m, QuantModule) for m in model.modules()):
        raise ExportError(
            f"deploy: {type(model).__name__} has no quantized layer; expected a calibrated model. "
            "Run torchq.quantize_ first"
        )
    named = ((n, m) for n, m in model.named_modules() if isinstance(m, TensorQuantizer))
    on = ((name, q) for name, q in named if q.quantizing and not q.descriptor.dynamic)
    if unknown := [name for name, q in on if not q.calibrated]:
        raise ExportError(
            f"deploy: no range is known for {', '.join(unknown)}; expected calibrated quantizers. "
            "Run torchq.calibrate first"
        )


def _copy(model: nn.Module) -> nn.Module:
    try:
        with (
            torch.no_grad()
        ):  # Else parameters of copied scripts would be results of a computation.
            return utils.copy_module(model)
    except Exception as error:  # classes copy themselves in any way they like
        reason = str(error).partition("\n")[0]
        raise ExportError(
            f"deploy: got a {float_name(model)} that cannot be copied ({reason}); expected one "
            "whose modules copy.deepcopy can copy"
        ) from error


def _replace_layers(model: nn.Module, example: object) -> nn.Module:
    """Replace every quantized layer that has an integer kernel, and round the weights of others."""
    named = list(utils.modules_with_names(model))
    shared = _shared_parameters(model)
    calls = lower_calls_(model, example)
    float_inputs: list[str] = []
    for names, module in named:
        if not isinstance(module, QuantModule) or module.is_container:
            continue
        _remove_weight_hooks(module)
        if hook := forward_hook_kind(module):
            new: nn.Module | str = f"it has {hook}"
        else:
            new = calls[id(module)] if id(module) in calls else lower(module)
        if new == "":
            continue  # Kernels compute its calls.
        if isinstance(new, str):
            log.debug("deploy: %s keeps simulating: %s", names[0], new)
            if new == FLOAT_INPUT:
                float_inputs.append(names[0] or type(module).__name__)
            _round_weights(module, new, shared)
            continue
        new.eval()
        copy_plain_attributes(module, new)
        for name in names:
            if name:
                utils.set_submodule(model, name, new)
            else:
                model = new
    if float_inputs:
        warnings.warn(
            f"deploy: the weight of {', '.join(float_inputs)} is quantized, but the input is not, "
            "so nothing there runs on integers. A target without an integer kernel for a layer "
            "leaves its input float. Call torchq.quantize_ without a target for torchq.deploy",
            stacklevel=5,
        )
    return model


def _remove_weight_hooks(module: nn.Module) -> None:
    """Replace what weight_norm, spectral_norm or pruning computes by a parameter, in place."""
    for remove in (remove_weight_norm, remove_spectral_norm):
        with suppress(ValueError):  # the layer has no such hook
            remove(module)
    masks = [
        name
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("_mask")
    ]
    for mask in masks:
        with suppress(ValueError):  # a buffer of another kind
            prune.remove(module, mask.removesuffix("_mask"))


def _shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that several modules have."""
    modules = model.modules()
    owners = Counter(id(p) for m in modules for p in m.parameters(recurse=False))
    return {key for key, count in owners.items() if count > 1}


def _round_weights(module: QuantModule, reason: str, shared: set[int]) -> None:
    """Round stored weights once instead of at every call, and leave a note for the summary."""
    module.deploy_note = reason  # type: ignore[assignment]
    if forward_hook_kind(module):
        return
    with torch.no_grad():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in shared:  # The others go on with the weight as it is.
                setattr(
                    module,
                    name,
                    nn.Parameter(parameter.clone(), parameter.requires_grad),
                )
        for quantizer, weight in module.quantized_weights():
            if _stores_weight(module, weight):
                rounded = quantizer(weight)
                # A quantizer that is off multiplies by its factors all the same.
                weight.copy_(rounded / quantizer.scaled(torch.ones_like(weight)))
                quantizer.mode = "off"


def _stores_weight(module: nn.Module, weight: Tensor) -> bool:
    """Return True for a parameter of ``module`` or a view; writing into others would be lost."""
    place = weight.untyped_storage().data_ptr()
    return any(place == p.untyped_storage().data_ptr() for p in module.parameters())


def _overflows(layer: nn.Module) -> bool:
    """Return True if two products of a layer overflow 16 bits."""
    if isinstance(layer, Int8Layer):
        largest = layer.input_qparams.quant_max
    elif isinstance(layer, DynamicInt8Linear):
        format = layer.descriptor.format
        largest = int(format.quant_max) + (SIGNED_ZERO_POINT if format.signed else 0)
    else:
        return False
    codes = layer.weight_codes
    weight = int(codes.int().abs().amax()) if codes.numel() else 0
    return 2 * largest * weight > torch.iinfo(torch.int16).max


def fuse_layers(
    model: nn.Module, whole: bool = True, with_state: frozenset[nn.Module] = frozenset()
) -> nn.Module:
    """Return what to use instead of ``model``, whose integer layers are fused where it is traced.

    What cannot be traced, or is not to be taken as a whole, is changed in place: it keeps its own
    forward, and its children are traced one by one. So does a module with a state, of which a trace
    would hold one value.
    """
    whole = whole and with_state.isdisjoint(model.modules())
    traced = _traced(model) if whole and _is_worth_tracing(model) else None
    if traced is not None:
        return traced
    for name, child in list(model.named_children()):
        if not _is_leaf(child):
            setattr(
                model,
                name,
                fuse_layers(child, not _may_be_taken_apart(child), with_state),
            )
    return model


def _with_state(
    model: nn.Module, paths: Iterable[str], example: object
) -> frozenset[nn.Module]:
    """Return the modules that keep something from call to call.

    Without an example these are the ones whose forward sets an attribute of the module.
    """
    if example is None:
        return frozenset(filter(sets_attributes, model.modules()))
    module_by_path = dict(model.named_modules(remove_duplicate=False))
    return frozenset(module_by_path[path] for path in paths if path in module_by_path)


def _traced(model: nn.Module) -> TracedModel | None:
    """Return ``model`` as one graph of fused layers; None if no graph does what it does."""
    graph = trace_or_none(model, _is_leaf)
    if graph is None or graph.meta[STORES_VALUES]:
        return None
    dtype = next(m.dtype for m in model.modules() if isinstance(m, Int8Layer))
    fused = fuse_graph(graph, dtype)
    return (
        None if fused is None else TracedModel(graph, fused, float_name(model), model)
    )


def _may_be_taken_apart(module: nn.Module) -> bool:
    """Return True if code around ``module`` may do more than call it with its defaults."""
    if isinstance(module, (nn.Sequential, torch.jit.ScriptModule)):
        return True
    return any(
        map(_is_option, inspect.signature(type(module).forward).parameters.values())
    )


def _is_option(parameter: inspect.Parameter) -> bool:
    """Return True for an argument that a trace fixes to its default."""
    return parameter.default is None or isinstance(
        parameter.default, (bool, int, float)
    )


def _gives_options(model: nn.Module, example: object) -> bool:
    """Return True if an example gives arguments that a trace would fix to their defaults."""
    args, kwargs = call_arguments(model, example)
    signature = inspect.signature(model.forward)
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        default = signature.parameters[name].default
        same = value is default or (
            isinstance(value, (bool, int, float)) and value == default
        )
        if _is_option(signature.parameters[name]) and not same:
            return True
    return False


def _is_leaf(module: nn.Module) -> bool:
    """Return True if ``module`` stays a single call: a layer, or foreign code without layers."""
    if isinstance(module, QuantModule):
        return not module.is_container
    return isinstance(module, _LAYERS) or is_torch_leaf(module)


def _is_worth_tracing(model: nn.Module) -> bool:
    """Return True if ``model`` holds integer layers and no forward hook would be lost."""
    if _is_leaf(model) or not any(isinstance(m, Int8Layer) for m in model.modules()):
        return False
    if isinstance(model, RoutedModule) and model.torchq_calls:
        return False  # Its forward keeps running, with notes on the calls that have no kernel.
    return not any(forward_hook_kind(m) for m in model.modules())
