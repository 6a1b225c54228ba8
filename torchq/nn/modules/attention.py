"""Quantized attention: torch's layer, and the function as a module.

:func:`attend` computes attention with quantizers on the operands of both matrix products.
:class:`ProjectedAttention` adds heads, masks and layouts around it, and is shared with deployed
models. The layers of this file add projections and quantizers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.nn.convert import QuantModule, register
from torchq.nn.integer_kernel import (
    CallOperands,
    integer_matmul,
    integer_projection,
)
from torchq.nn.modules.operators import ScaledDotProductAttention
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.utils import constant_while_tracing


def is_passive(quantizer: nn.Module) -> bool:
    """Return True if ``quantizer`` returns its input unchanged and observes nothing."""
    if not isinstance(quantizer, TensorQuantizer):
        return True
    return quantizer.mode == "off" and quantizer.pre_quant_scale is None


def _most_negative(dtype: torch.dtype) -> float:
    """Return minus infinity for masks: a softmax of a row that is masked as a whole is finite."""
    return torch.finfo(dtype).min / 4


def additive_mask(mask: Tensor, excluded: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to the scores, from bools (True: must not attend) where given."""
    if excluded is None:
        return mask.to(dtype).clamp(min=_most_negative(dtype))
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(excluded, _most_negative(dtype))


def _excluded(mask: Tensor) -> Tensor:
    """Return where a mask of :class:`torch.nn.MultiheadAttention` excludes a key for good."""
    return mask if mask.dtype is torch.bool else mask == -torch.inf


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix product of attention, before its operands are quantized.

    Attributes:
        of_first: the quantizer of the first operand; None where it is quantized already.
        first: (..., L, D).
        of_second: the quantizer of the second operand.
        second: (..., D, S).
        place: "scores", "result", or "masked result" where rows without a key follow.
    """

    of_first: nn.Module | None
    first: Tensor
    of_second: nn.Module
    second: Tensor
    place: str

    def simulated(self) -> Tensor:
        """Return the product of the quantized operands."""
        first = self.first if self.of_first is None else self.of_first(self.first)
        product: Tensor = first @ self.of_second(self.second)
        return product


class IntegerProducts(QuantModule):
    """Mixin of attention whose two products integer kernels may compute."""

    gives_float_results = True

    def product_of(self, product: Product) -> Tensor:
        """Return a product of :func:`attend`, of codes where a kernel has it."""
        of_first: object = product.of_first or self.softmax_quantizer
        factors = (of_first, product.first), (product.of_second, product.second)
        to = self.reader_of_result() if product.place == "result" else None
        result = integer_matmul(self, factors, product.place, to=to)
        return product.simulated() if result is None else result

    def reader_of_result(self) -> nn.Module | None:
        """Return the quantizer that the second product is rounded for; None leaves it float."""
        raise NotImplementedError


def attend(
    quantizers: tuple[nn.Module, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    unattended: Tensor | None,
    dropout_p: float,
    scale: float,
    multiply: Callable[[Product], Tensor] = Product.simulated,
) -> tuple[Tensor, Tensor]:
    """Return attention (..., L, D) and its weights (..., L, S), with quantized operands.

    The quantizers are those of the scaled query (..., L, D), the transposed key (..., S, D), the
    value (..., S, D) and the softmax; the mask is added to the scores. Rows that are
    ``unattended``, bools (..., L, 1), have no key: their weights and results are 0.
    """
    of_query, of_key, of_value, of_weights = quantizers
    # The key is transposed before it is quantized: a Transpose between DequantizeLinear and MatMul
    # would keep runtimes from fusing them.
    turned = key.transpose(-2, -1)
    scores = multiply(Product(of_query, query * scale, of_key, turned, "scores"))
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = of_weights(F.dropout(weights, dropout_p) if dropout_p else weights)
    place = "result" if unattended is None else "masked result"
    result = multiply(Product(None, weights, of_value, value, place))
    if unattended is None:
        return result, weights
    # Behind the product, so that nothing stands between the softmax and its quantizer.
    return result.masked_fill(unattended, 0), weights.masked_fill(unattended, 0)


class ProjectedAttention(nn.Module):
    """Multi-head attention without its projections, which a subclass computes.

    ``products`` are the slots of the scaled query, the transposed key, the value and the softmax.
    The other attributes are those of :class:`torch.nn.MultiheadAttention`.
    """

    products: ClassVar[tuple[str, ...]] = (
        "query_heads",
        "key_heads",
        "value_heads",
        "softmax",
    )
    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    bias_k: Tensor | None
    bias_v: Tensor | None

    def product_of(self, product: Product) -> Tensor:
        """Return a product of :func:`attend`."""
        return product.simulated()

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return the projections (N, length, embed_dim) of the inputs (N, length, width)."""
        raise NotImplementedError

    def _project_out(self, x: Tensor) -> Tensor:
        """Return the output projection of ``x`` (N, L, embed_dim)."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result and the attention weights, as torch's layer does."""
        self._check(query, attn_mask, is_causal)
        batched = query.dim() == 3
        first = self._batch_first(query, batched)
        # One tensor that is passed twice stays one tensor.
        second = first if key is query else self._batch_first(key, batched)
        third = second if value is key else self._batch_first(value, batched)
        q, k, v = self._heads(self._project(first, second, third))
        masks = self._masks(attn_mask, key_padding_mask)
        mask = self._additive_mask(masks, q)
        products = self._quantizers(self.products)
        dropout_p = self.dropout if self.training else 0.0
        weights = None
        if need_weights or not all(map(is_passive, products)):
            scale = 1 / math.sqrt(self.head_dim)
            unattended = self._unattended(masks)
            operands = (q, k, v, mask, unattended)
            y, weights = attend(products, *operands, dropout_p, scale, self.product_of)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
        y = self._project_out(y.transpose(1, 2).flatten(2))
        if not batched:
            y = y.squeeze(0)
        elif not self.batch_first:
            y = y.transpose(0, 1)
        if not need_weights or weights is None:
            return y, None
        weights = weights.mean(1) if average_attn_weights else weights
        return y, weights if batched else weights.squeeze(0)

    def _check(self, query: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
        """Refuse the arguments that torch's fast path alone accepts."""
        name = type(self).__name__
        if query.is_nested:
            raise QuantizationError(
                f"{name}: got a nested tensor; expected a padded one. Pass a key_padding_mask"
            )
        if is_causal and attn_mask is None:
            raise QuantizationError(
                f"{name}: got is_causal without attn_mask; expected both, the hint and the mask"
            )

    def _quantizers(self, slots: tuple[str, ...]) -> tuple[nn.Module, ...]:
        return tuple(getattr(self, f"{slot}_quantizer") for slot in slots)

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, projected: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return query, key, value, with their extra positions, as (N, heads, length, width)."""
        result = []
        extras = (None, self.bias_k, self.bias_v)
        for number, (x, extra) in enumerate(zip(projected, extras, strict=True)):
            if extra is not None:
                x = torch.cat([x, extra.expand(x.shape[0], -1, -1)], dim=1)
            x = x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            result.append(
                F.pad(x, (0, 0, 0, 1)) if number and self.add_zero_attn else x
            )
        return tuple(result)

    def _masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Sequence[Tensor]:
        """Return the masks that are given, so that they broadcast with (N, heads, L, S)."""
        masks = []
        if attn_mask is not None and attn_mask.dim() == 3:
            masks.append(attn_mask.view(-1, self.num_heads, *attn_mask.shape[1:]))
        elif attn_mask is not None:
            masks.append(attn_mask)
        if key_padding_mask is not None:
            batched = key_padding_mask.dim() == 2
            padded = key_padding_mask if batched else key_padding_mask.unsqueeze(0)
            masks.append(padded[:, None, None, :])
        return masks

    @property
    def _extra_keys(self) -> int:
        """The number of keys beside those of the input, which no mask excludes."""
        return int(self.bias_k is not None) + int(self.add_zero_attn)

    def _additive_mask(self, masks: Sequence[Tensor], query: Tensor) -> Tensor | None:
        """Return one mask to add to the scores, or None."""
        if not masks:
            return None
        added = [
            additive_mask(mask, mask if mask.dtype is torch.bool else None, query.dtype)
            for mask in masks
        ]
        return F.pad(sum(added[1:], added[0]), (0, self._extra_keys))

    def _unattended(self, masks: Sequence[Tensor]) -> Tensor | None:
        """Return which rows have no key left, (N, heads, L, 1) or what broadcasts, or None."""
        if not masks or self._extra_keys:
            return None
        excluded = reduce(torch.logical_or, map(_excluded, masks))
        return excluded.all(-1, keepdim=True)


def _product_descriptors(
    input: QuantDescriptor | None,
) -> tuple[QuantDescriptor | None, ...]:
    """Return the descriptors of query, transposed key, value and softmax, given one for inputs."""
    if input is None:
        return (None,) * 4
    second = input
    # Blocks follow the axis that the matrix product sums over.
    if input.block_size is not None and input.block_axis == -1:
        second = input.replace(block_axis=-2)
    unsigned: dict[str, bool] = {}
    if isinstance(input.num_bits, int):
        unsigned = {"unsigned": True, "narrow_range": False, "symmetric": True}
    return input, second, second, input.replace(**unsigned)


def _thirds(packed: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of query, key and value, as slices: exporters fold those into constants."""
    size = packed.shape[0] // 3
    return tuple(packed.narrow(0, size * part, size) for part in range(3))


@register(ScaledDotProductAttention)
class QuantScaledDotProductAttention(IntegerProducts, ScaledDotProductAttention):
    """:class:`ScaledDotProductAttention` with the operands of both matrix products quantized.

    They are the scaled query, the transposed key, the softmax (unsigned) and the value. The result
    of a row whose keys are all masked is 0, as that of torch.
    """

    input_slots = ("input", "key", "value", "softmax")
    weight_slots = ()
    factor_slots = input_slots

    @classmethod
    def slot_descriptors(
        cls, input: QuantDescriptor | None, weight: QuantDescriptor | None
    ) -> dict[str, QuantDescriptor | None]:
        """Return the rule's descriptor, unsigned for the softmax."""
        return dict(zip(cls.input_slots, _product_descriptors(input), strict=True))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return attention with quantized operands; the arguments are those of the function."""
        quantizers = tuple(
            getattr(self, f"{slot}_quantizer") for slot in self.input_slots
        )
        if all(map(is_passive, quantizers)):
            return super().forward(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        if enable_gqa:
            heads = query.shape[-3]
            key = key.repeat_interleave(heads // key.shape[-3], dim=-3)
            value = value.repeat_interleave(heads // value.shape[-3], dim=-3)
        unattended = None
        if is_causal:
            shape = (query.shape[-2], key.shape[-2])
            device = query.device
            attn_mask = torch.ones(shape, dtype=torch.bool, device=device).tril()
        elif attn_mask is not None:
            is_bool = attn_mask.dtype is torch.bool
            unattended = _excluded(~attn_mask if is_bool else attn_mask).all(
                -1, keepdim=True
            )
        if attn_mask is not None:
            excluded = ~attn_mask if attn_mask.dtype is torch.bool else None
            attn_mask = additive_mask(attn_mask, excluded, query.dtype)
        with constant_while_tracing():
            scale = 1 / math.sqrt(int(query.shape[-1])) if scale is None else scale
        operands = (query, key, value, attn_mask, unattended)
        return attend(quantizers, *operands, dropout_p, scale, self.product_of)[0]

    def reader_of_result(self) -> nn.Module | None:
        """Return the quantizer behind this operator, where the plan knows it."""
        if self.integer_kernel is None or not self.rounded_by:
            return None
        return self.integer_kernel.result


@register(nn.MultiheadAttention)
class QuantMultiheadAttention(
    IntegerProducts, ProjectedAttention, nn.MultiheadAttention
):
    """Quantized :class:`torch.nn.MultiheadAttention`: the same arguments, results and parameters.

    The inputs and weights of all four projections are quantized. The inputs have
    ``input_quantizer``, ``key_quantizer``, ``value_quantizer`` and ``out_input_quantizer``. The
    weights have ``weight_quantizer`` (of the query), ``key_weight_quantizer``,
    ``value_weight_quantizer`` and ``out_weight_quantizer``, each on its part of
    ``in_proj_weight``. The operands of the two matrix products have quantizers as well:
    ``query_heads_quantizer`` (of the scaled query), ``key_heads_quantizer``,
    ``value_heads_quantizer`` and ``softmax_quantizer`` (unsigned). These four are off unless
    ``quantize_`` turns them on, as for "onnxruntime" and "openvino".

    With every quantizer off this is torch's own forward, bit for bit. Otherwise the weights of a
    row whose keys are all masked are 0, where torch gives 0 or NaN: calibration refuses NaN.

    Raises:
        QuantizationError: An input is a nested tensor, which only torch's fused kernel accepts.

    Example:
        >>> attention = torchq.nn.QuantMultiheadAttention(8, 2, batch_first=True)
        >>> tokens = torch.randn(1, 5, 8)
        >>> attention(tokens, tokens, tokens)[0].shape
        torch.Size([1, 5, 8])
    """

    projections: ClassVar[tuple[str, ...]] = ("input", "key", "value", "out_input")
    input_slots = (*projections, *ProjectedAttention.products)
    weight_slots = ("weight", "key_weight", "value_weight", "out_weight")
    optional_slots: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ProjectedAttention.products, "attention"
    )
    factor_slots = ProjectedAttention.products

    @classmethod
    def slot_descriptors(
        cls, input: QuantDescriptor | None, weight: QuantDescriptor | None
    ) -> dict[str, QuantDescriptor | None]:
        """Return the rule's descriptors; see :func:`attend` for those of the matrix products."""
        products = dict(zip(cls.products, _product_descriptors(input), strict=True))
        layers = dict.fromkeys(cls.projections, input) | dict.fromkeys(
            cls.weight_slots, weight
        )
        return layers | products

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        """Yield each weight quantizer with its part of the packed projections."""
        quantizers = self._quantizers(self.weight_slots)
        for quantizer, weight in zip(
            quantizers, self.projection_weights(), strict=True
        ):
            if isinstance(quantizer, TensorQuantizer):
                yield quantizer, weight

    def projection_weights(self) -> tuple[Tensor, ...]:
        """Return the weights of query, key, value and output projection, each (out, in)."""
        packed = cast("Tensor | None", self.in_proj_weight)
        parts = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        inputs = parts if packed is None else _thirds(packed)
        return (*inputs, self.out_proj.weight)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result and the attention weights; the arguments are those of torch."""
        passive = all(map(is_passive, self._quantizers(self.slots())))
        forward = (
            nn.MultiheadAttention.forward if passive else ProjectedAttention.forward
        )
        masks = (
            key_padding_mask,
            need_weights,
            attn_mask,
            average_attn_weights,
            is_causal,
        )
        return forward(self, query, key, value, *masks)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        biases = (
            (None,) * 3 if self.in_proj_bias is None else _thirds(self.in_proj_bias)
        )
        # The output projection comes later.
        rows = zip(
            (query, key, value),
            self.projection_weights()[:3],
            biases,
            self.projections[:3],
            self.weight_slots[:3],
            strict=True,
        )
        return [self._linear(*row) for row in rows]

    def _project_out(self, x: Tensor) -> Tensor:
        bias = self.out_proj.bias
        slots = self.projections[-1], self.weight_slots[-1]
        return self._linear(x, self.out_proj.weight, bias, *slots)

    def _linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *slots: str
    ) -> Tensor:
        """Return a projection, with the slots of its input and of its weight."""
        operands = CallOperands(x, weight, bias, False, gives_float=True)
        of_input, of_weight = self._quantizers(slots)
        result = integer_projection(self, (of_input, of_weight), operands, slots[1])
        if result is not None:
            return result
        return F.linear(of_input(x), of_weight(weight), bias)

    def reader_of_result(self) -> nn.Module | None:
        """Return the quantizer of the output projection, which only moves stand in front of."""
        of_result = self._quantizers(self.projections)[-1]
        return None if is_passive(of_result) else of_result


class _WithoutFusedKernel(QuantModule):
    """Base of containers whose attribute ``setting`` lets torch bypass their children."""

    input_slots = ()
    weight_slots = ()
    is_container = True
    setting: ClassVar[str]

    def on_convert(self) -> None:
        """Turn the fused kernel off."""
        self.float_setting = getattr(self, self.setting)
        setattr(self, self.setting, 0)

    def on_revert(self) -> None:
        """Give the module its own setting back."""
        setattr(self, self.setting, self.float_setting)
        del self.float_setting


@register(nn.TransformerEncoderLayer)
class QuantTransformerEncoderLayer(_WithoutFusedKernel, nn.TransformerEncoderLayer):
    """:class:`torch.nn.TransformerEncoderLayer` that calls its children in eval mode too.

    In eval mode without gradients torch runs a fused kernel that reads the weights of ``linear1``
    and ``linear2`` directly, so that no quantizer sees them. The kernel exists only for ReLU and
    GELU, and the attribute ``activation_relu_or_gelu`` of the layer says which of them it has.
    The value 0 stands for neither and turns the kernel off.
    """

    setting = "activation_relu_or_gelu"


@register(nn.TransformerEncoder)
class QuantTransformerEncoder(_WithoutFusedKernel, nn.TransformerEncoder):
    """:class:`torch.nn.TransformerEncoder` that passes padded tensors to its layers.

    With a padding mask, in eval mode, torch packs the batch into a nested tensor for the fused
    kernel of the layers. Quantized layers do not accept nested tensors. So the results at padded
    positions are those that torch gives with gradients, under autocast, ``torch.compile`` and in
    exported files, where without these it gives 0; all others are the same. What averages over
    positions has to leave the padded ones out.
    """

    setting = "use_nested_tensor"
