"""Multi-head attention whose projections are the layers that linear layers become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torchq.lowering.modules.linear import Int8Linear
from torchq.lowering.registry import LOWERINGS, active, lower
from torchq.nn import QuantLinear, QuantModule, QuantMultiheadAttention, convert_
from torchq.nn.modules.attention import ProjectedAttention

__all__ = ["DeployedMultiheadAttention"]

#: The letters of query, key and value.
_NAMES = "qkv"


class DeployedMultiheadAttention(ProjectedAttention):
    """:class:`torch.nn.MultiheadAttention` for inference, its projections on the kernels of linear layers: same arguments and results.

    Scores, softmax and their product with the values are computed in floating point; where the operands of these products are
    quantized that is simulated.

    Args:
        module: the layer that this one takes the place of; it says all but the projections.
        in_proj: the projections of query, key and value. One of several inputs with the same range is called by their letters
            (``"qkv"``, ``"kv"``) and gives their projections side by side.
        out_proj: the output projection.
    """

    def __init__(
        self, module: QuantMultiheadAttention, in_proj: Mapping[str, nn.Module], out_proj: nn.Module
    ) -> None:
        super().__init__()
        for name in (
            "embed_dim",
            "num_heads",
            "head_dim",
            "dropout",
            "batch_first",
            "add_zero_attn",
        ):
            setattr(self, name, getattr(module, name))
        for name in ("bias_k", "bias_v"):
            extra = getattr(module, name)
            self.register_buffer(name, None if extra is None else extra.detach().clone())
        for slot in self.products:
            self.add_module(
                f"{slot}_quantizer", active(getattr(module, f"{slot}_quantizer")) or nn.Identity()
            )
        self.in_proj, self.out_proj = nn.ModuleDict(in_proj), out_proj
        # torch's encoder layer asks for it, and has a fused kernel that would pass by the projections where there is one.
        self.in_proj_bias = None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        given = dict(zip(_NAMES, (query, key, value), strict=True))
        found: dict[str, Tensor] = {}
        for names, layer in self.in_proj.items():
            source = wide = None
            for position, name in enumerate(names):
                if (
                    wide is None or given[name] is not source
                ):  # different tensors of the same range: rare, what is too much is dropped
                    source = given[name]
                    wide = layer(_quantized(layer, source))
                found[name] = wide.narrow(-1, position * self.embed_dim, self.embed_dim)
        return [found[name] for name in _NAMES]

    def _project_out(self, x: Tensor) -> Tensor:
        result: Tensor = self.out_proj(_quantized(self.out_proj, x))
        return result

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The weights of query, key and value as floating point, made anew: for code that reads them, or their dtype or device.

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
        """For :func:`torchq.summary`; the projections have rows of their own."""
        size = sum(b.numel() * b.element_size() for b in self.buffers(recurse=False))
        simulated = any(active(quantizer) for quantizer in self._quantizers(self.products))
        return (
            "float",
            size,
            "both products" + (", their quantized operands simulated" if simulated else ""),
        )


def _quantized(layer: nn.Module, x: Tensor) -> Tensor:
    """Codes, where the layer takes them: given numbers, it would search them for negative ones, which there are in all likelihood."""
    return layer.codes(x) if isinstance(layer, Int8Linear) else x


@LOWERINGS.register(QuantMultiheadAttention)
def _attention(module: QuantModule, reduce_range: bool) -> nn.Module | str:
    assert isinstance(module, QuantMultiheadAttention)
    layers = []
    for name, projection in zip(
        ("query", "key", "value", "output"), _projections(module), strict=True
    ):
        layer = lower(projection, reduce_range)
        if isinstance(layer, str):
            return f"projection of the {name}: {layer}"
        layers.append(layer)
    return DeployedMultiheadAttention(module, _joined(layers[:3]), layers[3])


def _projections(module: QuantMultiheadAttention) -> list[QuantLinear]:
    """The four projections as layers of their own, with the quantizers of ``module``."""
    biases = [None] * 3 if module.in_proj_bias is None else [*module.in_proj_bias.chunk(3)]
    result = []
    slots = zip(module.projections, module.weight_slots, strict=True)
    for (of_input, of_weight), weight, bias in zip(
        slots, module.projection_weights(), [*biases, module.out_proj.bias], strict=True
    ):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
        linear = convert_(layer)
        assert isinstance(linear, QuantLinear)
        linear.input_quantizer, linear.weight_quantizer = (
            getattr(module, f"{slot}_quantizer") for slot in (of_input, of_weight)
        )
        result.append(linear)
    return result


def _joined(layers: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The projections of query, key and value, those on one qparams as one layer: their inputs are likely to be one tensor."""
    groups: dict[str, list[nn.Module]] = {}
    for name, layer in zip(_NAMES, layers, strict=True):
        names = next(
            (names for names, others in groups.items() if _same_input(others[0], layer)), ""
        )
        groups[names + name] = [*groups.pop(names, []), layer]
    return {names: _stacked(members) for names, members in groups.items()}


def _same_input(a: nn.Module, b: nn.Module) -> bool:
    if (
        not (isinstance(a, Int8Linear) and isinstance(b, Int8Linear))
        or a.weight_codes.shape[1] != b.weight_codes.shape[1]
    ):
        return False
    return (
        a.input_qparams == b.input_qparams
        and a.pre_quant_scale is None
        and b.pre_quant_scale is None
    )


def _stacked(layers: list[nn.Module]) -> nn.Module:
    """One layer that computes the results of all, side by side."""
    first, members = layers[0], [layer for layer in layers if isinstance(layer, Int8Linear)]
    if len(layers) == 1 or not isinstance(first, Int8Linear):
        return first
    codes, scales = (
        torch.cat([getattr(layer, name) for layer in members])
        for name in ("weight_codes", "weight_scale")
    )
    biases = [layer.bias for layer in members if layer.bias is not None]
    return Int8Linear(
        codes, scales, torch.cat(biases) if biases else None, first.input_qparams, first.dtype, None
    )
