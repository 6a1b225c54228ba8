"""Why a module cannot be quantized, whatever the rules say."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from torchq.nn import QUANTIZED, QuantModule, quantized_class
from torchq.swap.decision import no_twin
from torchq.utils import qualified_name


def obstacle(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Return why ``module`` cannot be swapped."""
    cls = type(module)
    if isinstance(module, QuantModule):
        return "quantized already"
    if isinstance(parent, nn.MultiheadAttention) and module is parent.out_proj:
        if quantized_class(type(parent)) is not None or isinstance(parent, QuantModule):
            return None  # It is quantized as a part of its parent.
        return "its weight is read by nn.MultiheadAttention directly, its forward is never called"
    if isinstance(module, parametrize.ParametrizationList):
        return None  # It computes a tensor of its parent.
    if parametrize.is_parametrized(module) and not _reads_attributes(cls):
        return "parametrized; bake it with torch.nn.utils.parametrize.remove_parametrizations first"
    if quantized_class(cls) is not None:
        if "forward" in vars(module):
            return "forward was replaced on the instance"
        is_complex = any(p.is_complex() for p in module.parameters(recurse=False))
        return "complex dtype" if is_complex else ""
    base = next((c for c in cls.__mro__[1:] if c in QUANTIZED), None)
    name = qualified_name(cls)
    if base is not None and issubclass(cls, LazyModuleMixin):
        return "not initialised yet; run one batch through the model first"
    if base is not None:
        return (
            f"a subclass of {base.__name__} with code of its own may compute something else; "
            f"register a twin with torchq.nn.register({name})"
        )
    if any(p.dim() > 1 and p.is_floating_point() for p in module.parameters(recurse=False)):
        return no_twin(cls)
    return None


def _reads_attributes(cls: type[nn.Module]) -> bool:
    """Return True if the twin of ``cls`` computes with the weights that its attributes give.

    Recurrent layers keep a list of their weights, which a parametrization does not change.
    """
    return quantized_class(cls) is not None and not issubclass(cls, nn.RNNBase)
