"""BatchNorms whose results were quantized, and that another tool than ``fuse_`` has folded.

A runtime that computes on integers between quantizers alone reads the result of a convolution
through the quantizer of the BatchNorm behind it. Tools that fold BatchNorms themselves, as
Ultralytics does before it validates or exports, know nothing of it: it is gone with the BatchNorm.
"""

from torch import nn

from torchq.errors import QuantizationError
from torchq.fusion import fusion_record
from torchq.nn.modules.batchnorm import QuantNorm
from torchq.swap.apply import recorded_plans

_SHOWN = 3


def check_norms(function: str, model: nn.Module) -> None:
    """Refuse a model that lacks quantizers of results which its plan has behind BatchNorms.

    Args:
        function: what the user called.
        model: any module; left unchanged.

    Raises:
        QuantizationError: Another tool has folded or removed the BatchNorms.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    folded = {norm for entry in fusion_record(model) for norm in entry.get("norms", ())}
    norms = {
        ".".join(filter(None, (prefix, decision.name)))
        for prefix, plan in recorded_plans(model)
        for decision in plan.decisions
        if decision.is_norm
    }
    lost = sorted(
        path for path in norms - folded if not isinstance(modules.get(path), QuantNorm)
    )
    if lost:
        more = f", ... ({len(lost)} in all)" if len(lost) > _SHOWN else ""
        raise QuantizationError(
            f"{function}: {', '.join(lost[:_SHOWN])}{more}: got no BatchNorm, whose result was "
            "quantized; expected it, or torchq.fuse_ to have folded it, which keeps the quantizer. "
            "Another tool has folded it: call torchq.fuse_(model, example) on the model as it was "
            "trained, before that tool does"
        )
