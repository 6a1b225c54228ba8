"""Predicates on modules: which are layers and BatchNorms, and whether their tensors may change.

All that fusion knows of quantization is here too. It imports no quantizer and no number format: a
module counts as quantized if it has a child named ``*_quantizer``, and a quantized layer takes part
in fusion through :class:`RescalesOutput`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from torchq.fusion.algebra import batch_norm_affine
from torchq.graph import forward_hook_kind, is_torch_leaf
from torchq.graph.operators import BATCH_NORMS, LAYERS, TRANSPOSED

_NORM_TENSORS = ("weight", "bias", "running_mean", "running_var")


QUANTIZED_FIRST = (
    "holds quantizers; expected the order fuse_, quantize_, calibrate: restore_ the model, fuse it,"
    " then quantize and calibrate again"
)


@dataclass(frozen=True)
class OutputFold:
    """What a quantized layer says of a map that was folded into it.

    Attributes:
        codes: how many codes its weight has.
        changed: bool, the shape of the weight: the codes that could not stay what they were but
            for their sign.
        inexact: bool, the same shape: the codes whose values are off by more than a rounding.
        exact: bool ``(out_channels,)``: the channels without such values.
        relative: how far results may be off in these channels, relative to their largest terms.
        absolute: float64 ``(out_channels,)``: how far they may be off beside that.
        remarks: sentences for the report.
        has_range: the quantizer of the weight has a range. Without one the weight is a product of
            floats, and results are compared without that quantizer.
    """

    codes: int
    changed: Tensor
    inexact: Tensor
    exact: Tensor
    relative: float
    absolute: Tensor
    remarks: tuple[str, ...] = ()
    has_range: bool = True


@runtime_checkable
class RescalesOutput(Protocol):
    """A layer with a quantized weight whose output channels can be scaled without changing a code.

    The weight's range of output channel ``c`` grows by ``|scale[c]|``, and a negative scale flips
    the sign of the codes. ``fuse_`` asks :meth:`output_scale_obstacle` while it plans, lets a copy
    of the layer do :meth:`fold_output_`, and compares the copy with the layer: its codes by
    :meth:`folded_codes_obstacle`, and its results.
    """

    def output_scale_obstacle(self, scale: Tensor) -> str | None:
        """Return why the codes could not stay the same under ``scale``, or None if they can.

        ``scale`` is ``(out_channels,)``, of any sign.
        """
        ...

    def fold_output_(self, scale: Tensor, shift: Tensor) -> OutputFold:
        """Compute ``scale * result + shift`` per output channel from now on, in place."""
        ...

    def folded_codes_obstacle(
        self, folded: nn.Module, scale: Tensor, outcome: OutputFold
    ) -> str | None:
        """Return which codes of a folded copy are not those of this layer, or None."""
        ...

    def norm_is_folded_(
        self, path: str, norm: str, quantizer: nn.Module | None
    ) -> None:
        """Take over what the BatchNorm at the path ``norm`` had, such as a quantizer of results."""
        ...


@runtime_checkable
class QuantizesOutput(Protocol):
    """A BatchNorm whose result is quantized, by its child ``output_quantizer`` and nothing else."""

    output_quantizer: nn.Module
    quantizes_output: bool


def holds_quantizers(module: nn.Module) -> bool:
    """Return True if ``module`` or a descendant has a child ``*_quantizer``, no Identity."""
    return any(
        name.rpartition(".")[2].endswith("_quantizer")
        and type(child) is not nn.Identity
        for name, child in module.named_modules()
    )


def output_quantizer_of(norm: nn.Module) -> nn.Module | None:
    """Return the quantizer of the result of a BatchNorm; None for one that is all float."""
    if not (isinstance(norm, QuantizesOutput) and norm.quantizes_output):
        return None
    return norm.output_quantizer


def weight_slot(layer: nn.Module) -> str | None:
    """Return the name of the child that quantizes the weight of a layer; None for a float one.

    Layers of pytorch-quantization have a leading underscore there.
    """
    children = dict(layer.named_children())
    names = ("weight_quantizer", "_weight_quantizer")
    return next((name for name in names if name in children), None)


def holders_of(model: nn.Module, part: object, other_than: nn.Module) -> list[str]:
    """Return the paths of the modules with ``part`` as a child or parameter, but for one module."""
    paths = []
    for path, module in model.named_modules():
        members = (*module.children(), *module.parameters(recurse=False))
        if module is not other_than and any(member is part for member in members):
            paths.append(path)
    return paths


def is_layer(module: nn.Module | None) -> TypeGuard[Any]:
    """Return True for a convolution, a transposed convolution or a linear layer."""
    return isinstance(module, (*LAYERS, *TRANSPOSED))


def is_norm(module: nn.Module | None) -> TypeGuard[Any]:
    """Return True for a BatchNorm of torch, a subclass, or a frozen one, of four buffers."""
    if isinstance(module, BATCH_NORMS):
        return True
    if isinstance(module, nn.Identity):  # what norm_remainder has left
        return False
    buffers = () if module is None else dict(module.named_buffers(recurse=False))
    return all(name in buffers for name in _NORM_TENSORS)


def is_plain(module: nn.Module | None, *classes: type[nn.Module]) -> bool:
    """Return True if ``module`` is of one of ``classes``, without a ``forward`` of its own."""
    return isinstance(module, classes) and _inherits_forward(module)


def is_fuse_leaf(module: nn.Module) -> bool:
    """Return True if traces for fusion keep ``module`` as one call."""
    if calls_children(module):
        return _inherits_forward(module)
    return is_torch_leaf(module) or is_norm(module) or is_layer(module)


def calls_children(module: nn.Module) -> bool:
    """Return True for a layer with modules inside, such as detectron2's Conv2d with its norm."""
    has_children = is_layer(module) and next(module.children(), None) is not None
    return has_children and not holds_quantizers(module)


def torch_base(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``torch.nn`` that ``module`` is of or derives from."""
    return next(
        cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.")
    )


def _inherits_forward(module: nn.Module) -> bool:
    return type(module).forward is torch_base(module).forward and "forward" not in vars(
        module
    )


def output_channels(layer: nn.Module) -> int:
    """Return the number of output channels (or features) of a layer."""
    channels = (
        layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    )
    assert isinstance(channels, int)
    return channels


def spatial_dims_of(module: object) -> int:
    """Return the number of spatial dimensions of a layer or BatchNorm; 0 for a linear layer."""
    dims_by_class = {
        nn.Linear: 0,
        nn.Conv1d: 1,
        nn.BatchNorm1d: 1,
        nn.Conv3d: 3,
        nn.BatchNorm3d: 3,
    }
    return next(
        (dims for cls, dims in dims_by_class.items() if isinstance(module, cls)), 2
    )


def _tensor_obstacle(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """Return why the tensors of ``module`` cannot be read and replaced as they are, or None."""
    if parametrize.is_parametrized(module):
        return "is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    tensors = dict(module.named_parameters(recurse=False)) | dict(
        module.named_buffers(recurse=False)
    )
    for name in [name for name in names if getattr(module, name, None) is not None]:
        if name not in tensors:
            return f"computes its {name} (weight_norm, spectral_norm or pruning); remove that first"
        if reason := _value_obstacle(name, tensors[name]):
            return reason
    return None


def _value_obstacle(name: str, tensor: Tensor) -> str | None:
    """Return why the numbers of one tensor cannot be read, or None."""
    if is_lazy(tensor):
        return f"has an uninitialized {name}; run the model once first"
    if tensor.is_meta:
        return f"has its {name} on the meta device; load the weights first"
    if not tensor.is_floating_point():
        return f"has a {name} of {tensor.dtype}; expected a floating-point one"
    if tensor.layout != torch.strided:
        return f"has a {name} stored as {tensor.layout}; make it dense with to_dense() first"
    if not bool(torch.isfinite(tensor).all()):
        return f"has a {name} that is not finite"
    return None


def layer_obstacle(layer: nn.Module) -> str | None:
    """Return why the weight of ``layer`` may not be replaced, or None if it may."""
    if holds_quantizers(layer) and not isinstance(layer, RescalesOutput):
        return QUANTIZED_FIRST
    if forward_hook_kind(layer) == "a forward hook":
        return "has a forward hook that observes its output; remove the hook first"
    if "forward" in vars(layer):
        return "has a forward that was set on the object; delete that attribute first"
    return _tensor_obstacle(layer, ("weight", "bias"))


def norm_obstacle(norm: nn.Module) -> str | None:
    """Return why ``norm`` is not a fixed per-channel map that could be folded, or None if it is."""
    if norm.training and isinstance(norm, BATCH_NORMS):
        return "in training mode; call .eval() first"
    if (
        getattr(norm, "running_mean", None) is None
        or getattr(norm, "running_var", None) is None
    ):
        return "keeps no running statistics (track_running_stats=False)"
    quantizes_result = output_quantizer_of(norm) is not None
    if _holds_quantizers_beside_activation(norm) and not quantizes_result:
        return QUANTIZED_FIRST
    if hook := forward_hook_kind(norm):
        return f"has {hook}; remove it first"
    if quantizes_result:
        return _tensor_obstacle(norm, _NORM_TENSORS)
    if (
        not _inherits_forward(norm)
        and isinstance(norm, BATCH_NORMS)
        and not hasattr(norm, "act")
    ):
        return f"is a {type(norm).__name__}, whose forward may do more than BatchNorm"
    drop = getattr(norm, "drop", None)
    if isinstance(drop, nn.Module) and drop.training and type(drop) is not nn.Identity:
        return "drops values in training mode; call .eval() first"
    return _tensor_obstacle(norm, _NORM_TENSORS)


def _holds_quantizers_beside_activation(norm: nn.Module) -> bool:
    """Return True for quantizers in a norm; its activation stays, with those that it has."""
    activation = getattr(norm, "act", None)
    inside = set(activation.modules()) if isinstance(activation, nn.Module) else set()
    return any(
        name.rpartition(".")[2].endswith("_quantizer")
        and type(child) is not nn.Identity
        for name, child in norm.named_modules()
        if child not in inside
    )


def norm_affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a BatchNorm in eval mode, float64 ``(channels,)`` on the CPU."""
    tensors = (getattr(norm, name, None) for name in _NORM_TENSORS)
    weight, bias, mean, var = (None if t is None else t.detach().cpu() for t in tensors)
    assert mean is not None and var is not None
    return batch_norm_affine(mean, var, weight, bias, float(getattr(norm, "eps", 1e-5)))


def norm_remainder(norm: nn.Module) -> nn.Module:
    """Return what stays where ``norm`` was: the activation of a BatchNormAct2d, or an Identity.

    The Identity has the numbers of a BatchNorm that does nothing, as buffers that no state dict
    holds. Networks that fold their own BatchNorms later, as Ultralytics' do at each ``val`` and
    ``predict``, look for an attribute and read them: they fold a map that changes no number.
    """
    act = getattr(norm, "act", None)
    if isinstance(act, nn.Module):
        return act
    identity: Any = nn.Identity().train(norm.training)
    statistics = norm.get_buffer("running_var")
    # Nothing loads these numbers later, so a model without memory gets them on the CPU.
    one = torch.ones_like(
        statistics, device="cpu" if statistics.is_meta else statistics.device
    )
    for name in ("weight", "running_var"):
        identity.register_buffer(name, one.clone(), persistent=False)
    for name in ("bias", "running_mean"):
        identity.register_buffer(name, torch.zeros_like(one), persistent=False)
    identity.eps = 0.0
    return identity


def block_obstacle(block: nn.Module) -> str | None:
    """Return why the branches of ``block`` may not be merged and removed, or None if they may."""
    if holds_quantizers(block):
        return QUANTIZED_FIRST
    for path, module in block.named_modules():
        where = path or "it"
        if is_norm(module) and module.training and isinstance(module, BATCH_NORMS):
            return f"{where} is in training mode; call .eval() first"
        if path and (hook := forward_hook_kind(module)):
            return f"{where} has {hook}; remove it first"
        is_part = is_layer(module) or is_norm(module)
        if is_part and (reason := _tensor_obstacle(module, _NORM_TENSORS)):
            return f"{where} {reason}"
    return None
