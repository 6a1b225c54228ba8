"""Attention of transformers as modules, so that its products can be quantized.

Layers of transformers hand query, key and value to a function that the configuration names. It
stands outside of their forwards, which are all that torchq rewrites. Under the name "torchq" that
function calls a module of the layer: a place for quantizers, in the plan and in files.

Reference: transformers, AttentionInterface (docs/source/en/attention_interface.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.errors import QuantizationError
from torchq.graph import call_model, results_in, with_copies
from torchq.nn import ScaledDotProductAttention
from torchq.utils import RandomState, network_of, untouched
from torchq.utils.optional import import_optional
from torchq.workflow import is_quantized

__all__ = ["CHILD", "attend_in_modules_", "has_attention", "route_attention_"]

#: What a layer of attention calls the module that computes its products.
CHILD = "torchq_attend"
_IMPLEMENTATION = "torchq"
_WHERE = "attend_in_modules_"
#: The table that the forward of such a layer looks its function up in.
_TABLE = "ALL_ATTENTION_FUNCTIONS"
#: What some layers ask for and the function of torch cannot do.
_UNKNOWN = ("softcap", "s_aux")
#: Units in the last place by which results may change: a kernel adds in another order.
_UNITS = 64


def attend_in_modules_(model: nn.Module, example: object) -> list[str]:
    """Let the attention of a model of transformers be computed by modules, in place.

    Call it before :func:`torchq.quantize_`: a target with integer attention then quantizes the
    products of query and key, and of the softmax and value. ``model.set_attn_implementation(
    "sdpa")`` takes it back for a model that is not quantized.

    Args:
        model: of transformers, whose layers take their attention from ``AttentionInterface``.
        example: the arguments of one call; see :func:`torchq.graph.call_arguments`. Its results
            before and after are compared.

    Returns:
        The paths of the layers.

    Raises:
        QuantizationError: The model has no such layer or is quantized, or results differ by more
            than rounding, as of a layer whose function does more than attention. The model stays
            as it was.
        MissingExtraError: transformers is not installed.
    """
    model = network_of(model)
    if is_quantized(model):
        raise QuantizationError(
            f"{_WHERE}: {type(model).__name__}: is quantized; expected a float model, since plans "
            "name the modules of attention. Call torchq.restore_(model) first"
        )
    if not has_attention(model):
        raise QuantizationError(
            f"{_WHERE}: {type(model).__name__}: has no layer that takes its attention from "
            "transformers' AttentionInterface; expected a model of transformers. Other forwards "
            "that call scaled_dot_product_attention need nothing"
        )
    before = _results(model, example)
    layers = _layers(model)
    new = [layer for layer in layers.values() if not hasattr(layer, CHILD)]
    configs = _settings(model)
    try:
        route_attention_(model)
        problem = _difference(before, _results(model, example))
        if problem:
            raise QuantizationError(
                f"{_WHERE}: {type(model).__name__}: {problem}; expected what its own attention "
                "gives. Leave its attention in float"
            )
    except Exception:
        _take_back(new, configs)
        raise
    return list(layers)


def has_attention(model: nn.Module) -> bool:
    """Return True for a model of transformers with layers that can be routed."""
    return hasattr(model, "set_attn_implementation") and bool(_layers(model))


def route_attention_(model: nn.Module) -> None:
    """Do what :func:`attend_in_modules_` does without comparing anything."""
    _register()
    for layer in _layers(model).values():
        if not hasattr(layer, CHILD):
            layer.add_module(CHILD, ScaledDotProductAttention())
    model.set_attn_implementation(_IMPLEMENTATION)  # type: ignore[operator]


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose forward looks a function of attention up, by path."""
    layers = {}
    for name, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and _TABLE in code.co_names:
            layers[name] = module
    return layers


def _settings(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes of each configuration in a model, with a copy of them."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [(vars(config), dict(vars(config))) for config in configs.values()]


def _take_back(
    layers: Iterable[nn.Module],
    configs: Iterable[tuple[dict[str, object], dict[str, object]]],
) -> None:
    for layer in layers:
        if hasattr(layer, CHILD):
            delattr(layer, CHILD)
    for attributes, before in configs:
        attributes.clear()
        attributes.update(before)


def _results(model: nn.Module, example: object) -> list[Tensor]:
    start = RandomState.now()
    with untouched(model):
        results = results_in(call_model(model, with_copies(example)))
    start.restore()
    return results


def _difference(before: list[Tensor], after: list[Tensor]) -> str:
    """Return by how much results differ, if that is more than rounding; else ""."""
    if len(before) != len(after):
        return f"returns {len(after)} tensors instead of {len(before)}"
    for number, (expected, result) in enumerate(zip(before, after, strict=True)):
        finite = expected.isfinite()
        if not torch.equal(finite, result.isfinite()):
            return f"result {number} has NaN or infinity elsewhere"
        difference = (result - expected)[finite].abs().double()
        largest = expected[finite].abs().amax() if finite.any() else 0.0
        allowed = _UNITS * torch.finfo(expected.dtype).eps * float(largest)
        if difference.numel() and float(difference.amax()) > allowed:
            return f"result {number} is off by {float(difference.amax()):.2g}"
    return ""


@cache
def _register() -> None:
    """Enter the function, and the masks that it takes, at transformers, for this process."""
    needed = ("torchq.hugging_face", "integration")
    package = import_optional("transformers", *needed)
    masks = import_optional("transformers.masking_utils", *needed)
    package.AttentionInterface.register(_IMPLEMENTATION, _attend)
    masks.AttentionMaskInterface.register(_IMPLEMENTATION, masks.sdpa_mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute attention by the module of a layer, as transformers calls for it.

    Query, key and value are (batch, heads, length, size), with fewer heads of key and value where
    several queries share them. The result is (batch, length, heads, size).
    """
    asked = [name for name in _UNKNOWN if options.get(name) is not None]
    if asked:
        raise QuantizationError(
            f"{_WHERE}: {type(module).__name__}: asks its attention for {', '.join(asked)}; "
            "expected none, as scaled_dot_product_attention has none. Leave it in float: "
            'model.set_attn_implementation("eager")'
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    length = query.shape[2]
    # A single token sees all that was before it, and a mask says itself what is seen.
    hides_later = is_causal and attention_mask is None and length > 1
    if hides_later and key.shape[2] > length:  # room that a cache has not filled yet
        key = key[:, :, :length]
        value = value[:, :, :length]
    if position_bias is not None:
        if hides_later:
            seen = torch.ones(length, key.shape[2], dtype=torch.bool).tril()
            attention_mask = seen.to(query.device)
            hides_later = False
        attention_mask = _biased(position_bias, attention_mask)
    shares_heads = getattr(module, "num_key_value_groups", 1) > 1
    # Another model may have the same configuration object, which names this function.
    attend = getattr(module, CHILD, F.scaled_dot_product_attention)
    result = attend(
        query,
        key,
        value,
        attention_mask,
        dropout,
        hides_later,
        scale=scaling,
        enable_gqa=shares_heads,
    )
    return result.transpose(1, 2).contiguous(), None


def _biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return what is added to the products of query and key."""
    if mask is None:
        return bias
    if mask.dtype is torch.bool:
        return bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
    return bias + mask
