"""Attention of a deployed model, changed from float32 to bfloat16."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx, nn

from torchq.lowering.graph.traced_module import TracedModel
from torchq.lowering.modules.attention import DeployedMultiheadAttention
from torchq.lowering.modules.bfloat16_attention import BFloat16Attention

__all__ = ["use_bfloat16_attention_"]


def use_bfloat16_attention_(model: nn.Module, *, flash: bool = False) -> int:
    """Compute the products of attention in bfloat16, in place, where nothing but heads enters them.

    Attention with a mask, with dropout or with quantized products stays what it is.

    Args:
        model: deployed.
        flash: see :func:`attend_in_bfloat16`.

    Returns:
        The number of attentions that were changed.
    """
    count = 0
    for module in list(model.modules()):
        if isinstance(module, DeployedMultiheadAttention):
            module.products_in_bfloat16, module.flash = True, flash
            count += 1
        elif isinstance(module, TracedModel):
            nodes = [node for node in module.graph.nodes if _is_plain_attention(node)]
            for node in nodes:
                _replace(module, node, flash)
            if nodes:
                module.recompile()
            count += len(nodes)
    return count


def _is_plain_attention(node: fx.Node) -> bool:
    """Return True for a call with query, key and value, and perhaps a scale."""
    if node.target is not F.scaled_dot_product_attention or len(node.args) != 3:
        return False
    scale = node.kwargs.get("scale")
    return set(node.kwargs) <= {"scale"} and not isinstance(scale, fx.Node)


def _replace(model: TracedModel, node: fx.Node, flash: bool) -> None:
    name, scale = f"{node.name}_bfloat16", node.kwargs.get("scale")
    assert scale is None or isinstance(scale, (int, float))
    model.add_submodule(name, BFloat16Attention(scale, flash=flash).eval())
    with model.graph.inserting_before(node):
        new = model.graph.call_module(name, node.args)
    node.replace_all_uses_with(new)
    model.graph.erase_node(node)
