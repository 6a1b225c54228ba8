"""Multi-head attention with deployed projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torchq.lowering.eligible import LOWERINGS, active, as_linear, lower
from torchq.lowering.layer import Int8Linear
from torchq.nn import QuantLinear, QuantModule, QuantMultiheadAttention
from torchq.nn.modules.attention import ProjectedAttention

#: The letters of query, key and value.
_NAMES = "qkv"
#: The plain attributes that are those of the float layer.
_SETTINGS = ("embed_dim", "num_heads", "head_dim", "dropout", "batch_first", "add_zero_attn")


class DeployedMultiheadAttention(ProjectedAttention):
    """A :class:`torch.nn.MultiheadAttention` for inference with projections on integer kernels.

    Arguments and results of :meth:`forward` are those of the float layer. Scores, softmax and the
    product with the values are computed in floating point; quantized operands of the two matrix
    products are simulated.

    Args:
        module: the layer that this one replaces; it gives everything but the projections.
        in_proj: the projections of query, key and value. A projection of several inputs with the
            same range is named by their letters (``"qkv"``, ``"kv"``) and returns their
            projections side by side.
        out_proj: the output projection.
    """

    def __init__(
        self, module: QuantMultiheadAttention, in_proj: Mapping[str, nn.Module], out_proj: nn.Module
    ) -> None:
        super().__init__()
        for name in _SETTINGS:
            setattr(self, name, getattr(module, name))
        for name in ("bias_k", "bias_v"):
            extra = getattr(module, name)
            self.register_buffer(name, None if extra is None else extra.detach().clone())
        for slot in self.products:
            quantizer = active(getattr(module, f"{slot}_quantizer"))
            self.add_module(f"{slot}_quantizer", quantizer or nn.Identity())
        self.in_proj, self.out_proj = nn.ModuleDict(in_proj), out_proj
        for layer in (*in_proj.values(), out_proj):
            if isinstance(layer, Int8Linear):
                layer.reads_codes = True
        # torch's encoder layer asks for it; a layer that has one runs on torch's fused kernel,
        # which would pass by the projections.
        self.in_proj_bias = None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        given = dict(zip(_NAMES, (query, key, value), strict=True))
        found: dict[str, Tensor] = {}
        for names, layer in self.in_proj.items():
            source = wide = None
            for position, name in enumerate(names):
                # Different tensors that share a range are rare: the layer then computes all its
                # projections for each, of which one slice is kept.
                if wide is None or given[name] is not source:
                    source = given[name]
                    wide = layer(_quantized(layer, source))
                found[name] = wide.narrow(-1, position * self.embed_dim, self.embed_dim)
        return [found[name] for name in _NAMES]

    def _project_out(self, x: Tensor) -> Tensor:
        result: Tensor = self.out_proj(_quantized(self.out_proj, x))
        return result

    @property
    def in_proj_weight(self) -> Tensor | None:
        """A new tensor with the weights of query, key and value, for code that reads them.

        None where the widths of the inputs differ, as in torch's layer.
        """
        found: dict[str, Tensor] = {}
        for names, layer in self.in_proj.items():
            weight = layer.weight
            assert isinstance(weight, Tensor)
            found |= zip(names, weight.split(self.embed_dim), strict=True)
        same = all(weight.shape[1] == self.embed_dim for weight in found.values())
        return torch.cat([found[name] for name in _NAMES]) if same else None

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`.

        The projections have rows of their own.
        """
        size = sum(b.numel() * b.element_size() for b in self.buffers(recurse=False))
        simulated = any(active(quantizer) for quantizer in self._quantizers(self.products))
        note = "both products" + (", their quantized operands simulated" if simulated else "")
        return "float", size, note


def _quantized(layer: nn.Module, x: Tensor) -> Tensor:
    """Return ``x`` as codes where the layer reads them.

    Given numbers, an integer layer would look for negative ones, which nearly always exist here.
    """
    return layer.codes(x) if isinstance(layer, Int8Linear) else x


@LOWERINGS.register(QuantMultiheadAttention)
def _attention(module: QuantModule, reduce_range: bool) -> nn.Module | str:
    assert isinstance(module, QuantMultiheadAttention)
    layers = []
    names = ("query", "key", "value", "output")
    for name, projection in zip(names, _projections(module), strict=True):
        layer = lower(projection, reduce_range)
        if isinstance(layer, str):
            return f"projection of the {name}: {layer}"
        layers.append(layer)
    return DeployedMultiheadAttention(module, _merge_projections(layers[:3]), layers[3])


def _projections(module: QuantMultiheadAttention) -> list[QuantLinear]:
    """Return the four projections as linear layers with the quantizers of ``module``."""
    in_biases = [None] * 3 if module.in_proj_bias is None else [*module.in_proj_bias.chunk(3)]
    biases = [*in_biases, module.out_proj.bias]
    weights = module.projection_weights()
    slots = zip(module.projections, module.weight_slots, weights, biases, strict=True)
    return [
        as_linear(weight, bias, *(getattr(module, f"{slot}_quantizer") for slot in pair))
        for *pair, weight, bias in slots
    ]


def _merge_projections(layers: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the projections of query, key and value; those that read the same codes as one.

    Inputs with the same range are likely to be one tensor, as in self-attention.
    """
    groups: dict[str, list[nn.Module]] = {}
    for name, layer in zip(_NAMES, layers, strict=True):
        alike = [names for names, others in groups.items() if _reads_same_codes(others[0], layer)]
        names = alike[0] if alike else ""
        groups[names + name] = [*groups.pop(names, []), layer]
    return {names: _concatenate(members) for names, members in groups.items()}


def _reads_same_codes(a: nn.Module, b: nn.Module) -> bool:
    """Return True if two layers read an input of the same width and quantization parameters."""
    if not (isinstance(a, Int8Linear) and isinstance(b, Int8Linear)):
        return False
    scaled = a.pre_quant_scale is not None or b.pre_quant_scale is not None
    same_width = a.weight_codes.shape[1] == b.weight_codes.shape[1]
    return same_width and a.input_qparams == b.input_qparams and not scaled


def _concatenate(layers: list[nn.Module]) -> nn.Module:
    """Return one layer that computes the results of all, side by side."""
    first, members = layers[0], [layer for layer in layers if isinstance(layer, Int8Linear)]
    if len(layers) == 1 or not isinstance(first, Int8Linear):
        return first
    codes = torch.cat([layer.weight_codes for layer in members])
    scales = torch.cat([layer.weight_scale for layer in members])
    biases = [layer.bias for layer in members if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    return Int8Linear(codes, scales, bias, first.input_qparams, first.dtype, None)
