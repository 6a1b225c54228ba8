"""Multi-head attention whose projections are deployed linear layers."""

from collections.abc import Sequence

from torch import Tensor, nn

from torchq.lowering.eligible import LOWERINGS, active, as_linear, lower
from torchq.nn import QuantModule, QuantMultiheadAttention
from torchq.nn.modules.attention import ProjectedAttention

#: The plain attributes that are those of the float layer.
_SETTINGS = (
    "embed_dim",
    "num_heads",
    "head_dim",
    "dropout",
    "batch_first",
    "add_zero_attn",
)


class DeployedMultiheadAttention(ProjectedAttention):
    """A :class:`torch.nn.MultiheadAttention` for inference with projections on integer kernels.

    Arguments and results of :meth:`forward` are those of the float layer. Scores, softmax and the
    product with the values are computed in floating point; quantized operands of the two matrix
    products are simulated.

    Args:
        module: the layer that this one replaces; it gives everything but the projections.
        layers: the projections of query, key, value and result.
    """

    def __init__(
        self, module: QuantMultiheadAttention, layers: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        for name in _SETTINGS:
            setattr(self, name, getattr(module, name))
        for name in ("bias_k", "bias_v"):
            extra = getattr(module, name)
            self.register_buffer(
                name, None if extra is None else extra.detach().clone()
            )
        for slot in self.products:
            quantizer = active(getattr(module, f"{slot}_quantizer"))
            self.add_module(f"{slot}_quantizer", quantizer or nn.Identity())
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = layers
        # torch's encoder layer asks for it; a layer that has one runs on torch's fused kernel,
        # which would pass by the projections.
        self.in_proj_bias = None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        return self.q_proj(query), self.k_proj(key), self.v_proj(value)

    def _project_out(self, x: Tensor) -> Tensor:
        result: Tensor = self.out_proj(x)
        return result

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`; projections have rows."""
        size = sum(b.numel() * b.element_size() for b in self.buffers(recurse=False))
        simulated = any(
            active(quantizer) for quantizer in self._quantizers(self.products)
        )
        note = "both products" + (
            ", their quantized operands simulated" if simulated else ""
        )
        return "float", size, note


@LOWERINGS.register(QuantMultiheadAttention)
def _attention(module: QuantModule) -> nn.Module | str:
    assert isinstance(module, QuantMultiheadAttention)
    in_biases = (
        [None] * 3 if module.in_proj_bias is None else [*module.in_proj_bias.chunk(3)]
    )
    biases = [*in_biases, module.out_proj.bias]
    names = ("query", "key", "value", "output")
    slots = zip(module.projections, module.weight_slots, strict=True)
    rows = zip(names, module.projection_weights(), biases, slots, strict=True)
    layers = []
    for name, weight, bias, pair in rows:
        quantizers = [getattr(module, f"{slot}_quantizer") for slot in pair]
        layer = lower(as_linear(weight, bias, *quantizers))
        if isinstance(layer, str):
            return f"projection of the {name}: {layer}"
        layers.append(layer)
    return DeployedMultiheadAttention(module, layers)
