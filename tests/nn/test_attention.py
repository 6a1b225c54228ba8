"""Attention, in torch's own transformer too.

It has torch's numbers with the quantizers off, and those of the formula with them on.
"""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.functional import fake_quantize, reduce_amax
from torchq.nn import QuantScaledDotProductAttention, TensorQuantizer, convert_, revert_

OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 7, "vdim": 9, "batch_first": True},
    {"kdim": 7, "vdim": 9, "bias": False, "add_zero_attn": True},
]
MASKS: list[dict[str, Any]] = [
    {},
    {"need_weights": False},
    {"average_attn_weights": False, "attn_mask": torch.ones(4, 5).triu(2).bool()},
    {"need_weights": False, "attn_mask": torch.ones(4, 5).triu(2).bool()},
    {
        "attn_mask": torch.linspace(-2, 1, 6 * 20).view(6, 4, 5),
        "key_padding_mask": torch.tensor([[0.0, 0, 0, 0, -1.5], [0, 0, 0, -3, -3]]),
    },
    {
        "need_weights": False,
        "key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    },
]


def attention(**options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(12, 3, **options).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def tokens(module: nn.MultiheadAttention, batched: bool = True) -> list[Tensor]:
    """Query of length 4, key and value of length 5, two samples."""
    shapes = [
        (4, 12),
        (5, module.kdim),
        (5, module.vdim),
    ]
    if not batched:
        return [torch.randn(shape) for shape in shapes]
    return [
        torch.randn((2, *shape))
        if module.batch_first
        else torch.randn(shape[0], 2, shape[1])
        for shape in shapes
    ]


def set_modes(module: nn.Module, mode: str) -> None:
    for part in module.modules():
        if isinstance(part, TensorQuantizer):
            part.mode = mode


def quantize_products(module: Any) -> None:
    """Switch the quantizers of both matrix products on."""
    for slot in module.products:
        module.get_submodule(f"{slot}_quantizer").mode = "quantize"


def same(
    found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]
) -> bool:
    return all(
        (a is None and b is None) or torch.equal(a, b)
        for a, b in zip(found, expected, strict=True)
    )  # type: ignore[arg-type]


def quantized(module: nn.Module) -> Any:
    return convert_(
        copy.deepcopy(module), input=QuantDescriptor(), weight=QuantDescriptor(axis=0)
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masks", MASKS, ids=range(len(MASKS)))
def test_off_is_torch_and_observing_is_the_same_arithmetic(
    options: dict[str, Any], masks: dict[str, Any]
) -> None:
    module = attention(**options)
    twin = quantized(module)
    inputs = tokens(module)
    set_modes(twin, "off")
    with torch.no_grad():
        assert same(
            twin(*inputs, **masks),
            module(*inputs, **masks),
        )
    expected = module(*inputs, **masks)
    assert same(twin(*inputs, **masks), expected)
    set_modes(twin, "observe")
    for actual, want in zip(twin(*inputs, **masks), expected, strict=True):
        assert (actual is None) == (want is None)
        if want is not None:
            # float32 sums of at most 12 terms below 10 in another order
            torch.testing.assert_close(actual, want, rtol=0, atol=5e-6)


@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched(batch_first: bool) -> None:
    module = attention(batch_first=batch_first)
    twin = quantized(module)
    inputs = tokens(module, batched=False)
    set_modes(twin, "observe")
    mask = torch.tensor([False, False, False, False, True])
    for actual, want in zip(
        twin(*inputs, key_padding_mask=mask),
        module(*inputs, key_padding_mask=mask),
        strict=True,
    ):
        torch.testing.assert_close(actual, want, rtol=0, atol=5e-6)


def by_hand(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    products: bool,
) -> tuple[Tensor, Tensor]:
    """Batch first, no masks, no extras: the formula, with every operand rounded to its grid."""

    def q(x: Tensor, axis: int | None = None, unsigned: bool = False) -> Tensor:
        d = QuantDescriptor(axis=axis, unsigned=unsigned)
        return fake_quantize(
            x, reduce_amax(x, d.granularity), d.format, d.granularity, None
        )

    def split(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], 3, 4).permute(0, 2, 1, 3)

    weights = module.in_proj_weight.split(12)
    biases = module.in_proj_bias.split(12)
    heads = [
        split(F.linear(q(x), q(w, 0), b))
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    ]
    rounded = q if products else lambda x, *_: x
    scores = rounded(heads[0] * (1 / math.sqrt(4))) @ rounded(heads[1]).mT
    softmax = scores.softmax(-1)
    softmax = q(softmax, unsigned=True) if products else softmax
    y = (softmax @ rounded(heads[2])).permute(0, 2, 1, 3).reshape(query.shape)
    return F.linear(
        q(y), q(module.out_proj.weight, 0), module.out_proj.bias
    ), softmax.mean(1)


@pytest.mark.parametrize("products", [False, True])
def test_quantized_is_by_hand(products: bool) -> None:
    module = attention(batch_first=True)
    twin = quantized(module)
    inputs = tokens(module)
    if products:
        quantize_products(twin)
    assert same(
        twin(*inputs),
        by_hand(module, *inputs, products),
    )


def test_training_reaches_every_parameter() -> None:
    twin = quantized(attention(add_bias_kv=True, dropout=0.3)).train()
    quantize_products(twin)
    inputs = tokens(twin)
    assert not torch.equal(twin(*inputs)[0], twin(*inputs)[0])  # dropout
    twin(*inputs, need_weights=False)[0].square().sum().backward()
    assert all(
        parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        for parameter in twin.parameters()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_without_a_key_give_zero(dtype: torch.dtype) -> None:
    """torch gives NaN for the weights of such a row, which would be an error in calibration."""
    module = attention(batch_first=True)
    hidden = torch.tensor([[True] * 5, [False] * 5])
    twin = quantized(module).to(dtype)
    quantize_products(twin)
    inputs = [x.to(dtype) for x in tokens(module)]
    masks = {"key_padding_mask": hidden, "attn_mask": torch.ones(4, 5).triu(2).bool()}
    y, weights = twin(*inputs, **masks)
    assert torch.equal(
        weights[0],
        torch.zeros_like(weights[0]),
    )
    torch.testing.assert_close(
        weights[1].sum(-1), torch.ones(4, dtype=dtype), rtol=0, atol=0.1
    )
    no_attention = twin._project_out(torch.zeros(4, module.embed_dim, dtype=dtype))
    assert torch.equal(y[0], no_attention)


def test_two_masks_may_leave_a_row_without_a_key_together() -> None:
    module = attention(batch_first=True)
    twin = quantized(module)
    quantize_products(twin)
    first_alone = torch.full((4, 5), -torch.inf)
    first_alone[:, 0] = 0
    padded = torch.tensor([[True, False, False, False, False], [False] * 5])
    _, weights = twin(*tokens(module), key_padding_mask=padded, attn_mask=first_alone)
    assert not weights[0].any()
    assert torch.equal(
        weights[1, :, 0] > 0.9,
        torch.ones(4, dtype=torch.bool),
    )


def test_extra_keys_are_left_where_all_others_are_masked() -> None:
    module = attention(batch_first=True, add_zero_attn=True)
    twin = quantized(module)
    quantize_products(twin)
    _, weights = twin(
        *tokens(module), key_padding_mask=torch.ones(2, 5, dtype=torch.bool)
    )
    assert bool((weights[..., -1] > 0.9).all())


def test_revert_copies_and_state() -> None:
    module = attention(batch_first=True)
    keys = list(module.state_dict())
    inputs = tokens(module)
    with torch.no_grad():
        expected = module(*inputs)
        twin = quantized(module)
        for copied in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
            assert same(copied(*inputs), twin(*inputs))
        assert [key for key in twin.state_dict() if "quantizer" not in key] == keys
        twin.load_state_dict(module.state_dict(), strict=True)
        assert type(revert_(twin)) is nn.MultiheadAttention
        assert list(twin.state_dict()) == keys
        assert same(twin(*inputs), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_bad_inputs() -> None:
    twin = quantized(attention(batch_first=True))
    x = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(2, 12)])
    with pytest.raises(
        QuantizationError, match="got a nested tensor; expected a padded one"
    ):
        twin(x, x, x)
    with pytest.raises(
        RuntimeError, match="got is_causal without attn_mask; expected both"
    ):
        twin(*[torch.randn(1, 4, 12)] * 3, is_causal=True)
    assert twin(*[torch.randn(0, 4, 12)] * 3)[0].shape == (0, 4, 12)


class Seq2Seq(nn.Module):
    """Encoder and decoder of torch, the batch padded."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=batch_first)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.decoder(
            x, self.encoder(x, src_key_padding_mask=pad), memory_key_padding_mask=pad
        )


def batch() -> dict[str, Tensor]:
    pad = torch.zeros(3, 6, dtype=torch.bool)
    pad[1, 4:] = True
    return {"x": torch.randn(3, 6, 16), "pad": pad}


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino"])
def test_transformers_of_torch(target: str | None, tmp_path: Path) -> None:
    """In eval mode torch's fused kernel would read the weights past every quantizer."""
    model = Seq2Seq().eval()
    given = batch()
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = model(**given)
        report = torchq.quantize_(model, target=target)
        assert report.skipped == ()
        assert len([d for d in report.replaced if d.weight]) == 10
        torchq.calibrate(model, [given], progress=False)
        actual = model(**given)
        noise = (actual - expected)[~given["pad"]].square().sum() / expected[
            ~given["pad"]
        ].square().sum()
        assert 1e-7 < noise < 1e-3  # 8 bits: measured 48 dB
        on = {
            name
            for name, q in torchq.workflow.quantizers(model).items()
            if q.mode == "quantize"
        }
        assert ("decoder.multihead_attn.softmax_quantizer" in on) == (
            target is not None
        )
        for name in on:
            with torchq.disabled(model, name):
                assert not torch.equal(model(**given), actual), name
        torchq.save(model, tmp_path / "m.pt")
        assert torch.equal(
            torchq.load(Seq2Seq().eval(), tmp_path / "m.pt")(**given), actual
        )
        torchq.restore_(model)
        assert list(model.state_dict()) == keys
        assert torch.equal(model(**given), expected)


class Functional(nn.Module):
    """Calls the function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4)
            .transpose(1, 2)
            .flatten(2)
        )


@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt"])
@pytest.mark.parametrize("shown", [False, True], ids=["alone", "with an example"])
def test_the_function_becomes_a_child(target: str, shown: bool, tmp_path: Path) -> None:
    model = Functional().eval()
    x = torch.randn(2, 5, 8)
    expected = model(x)
    torchq.quantize_(model, target=target, example=x if shown else None)
    assert isinstance(model.quant_attention, QuantScaledDotProductAttention)
    with torchq.disabled(model):
        assert torch.equal(model(x), expected)
    torchq.calibrate(model, [x], progress=False)
    is_unsigned = model.quant_attention.softmax_quantizer.descriptor.unsigned
    assert is_unsigned is (target != "tensorrt")
    torchq.save(model, tmp_path / "m.pt")
    assert torch.equal(
        torchq.load(Functional().eval(), tmp_path / "m.pt")(x),
        model(x),
    )
    torchq.restore_(model)
    assert torch.equal(model(x), expected)
    plain = Functional()
    assert {d.name for d in torchq.quantize_(plain, target="executorch").replaced} == {
        "qkv"
    }


CALLS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"attn_mask": torch.ones(4, 5).tril(1).bool(), "scale": 0.3},
    {"attn_mask": torch.linspace(-1, 1, 20).view(4, 5)},
    {"enable_gqa": True},
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padded_positions_have_the_results_that_torch_exports() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x = torch.randn(2, 6, 16)
    padded = torch.zeros(2, 6, dtype=torch.bool)
    padded[1, 4:] = True
    with torch.no_grad():
        with torchq.utils.unfused_attention():
            expected = model(x, src_key_padding_mask=padded)
        of_fused_kernel = model(x, src_key_padding_mask=padded)
        assert not of_fused_kernel[padded].any()
        torchq.quantize_(model, progress=False)
        with torchq.disabled(model):
            actual = model(x, src_key_padding_mask=padded)
    assert actual[padded].any()
    # The order of sums in torch's two ways of attention.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", CALLS, ids=range(len(CALLS)))
def test_the_module_is_the_function(options: dict[str, Any]) -> None:
    heads = 2 if options.get("enable_gqa") else 6
    q = torch.randn(2, 6, 4, 3)
    k = torch.randn(2, heads, 5, 3)
    v = torch.randn(2, heads, 5, 3)
    module = QuantScaledDotProductAttention()
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    set_modes(module, "off")
    assert torch.equal(module(q, k, v, **options), expected)
    set_modes(module, "observe")
    torch.testing.assert_close(module(q, k, v, **options), expected, rtol=0, atol=1e-6)
    set_modes(module, "quantize")
    assert not torch.equal(module(q, k, v, **options), expected)
    assert type(revert_(module)).__name__ == "ScaledDotProductAttention"


@pytest.mark.parametrize("as_numbers", [False, True])
def test_a_row_without_a_key_is_that_of_the_function(as_numbers: bool) -> None:
    q, k, v = (torch.randn(2, 3, 4, 5) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    if as_numbers:
        mask = torch.zeros(4, 4).masked_fill(~mask, -torch.inf)
    module = QuantScaledDotProductAttention()
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    set_modes(module, "observe")
    torch.testing.assert_close(module(q, k, v, mask), expected, rtol=0, atol=1e-6)
    set_modes(module, "quantize")
    assert not module(q, k, v, mask)[..., 1, :].any()
    assert not expected[..., 1, :].any()


def test_blocks_follow_the_axis_that_is_summed_over() -> None:
    module = quantized(nn.MultiheadAttention(64, 2, batch_first=True).eval())
    revert_(module)
    blocks = QuantDescriptor((4, 3), block_size=32, scale_format="e8m0", dynamic=True)
    convert_(module, input=blocks, weight=blocks)
    quantize_products(module)
    axes = {
        slot: getattr(module, f"{slot}_quantizer").descriptor.block_axis
        for slot in module.products
    }
    assert axes == {
        "query_heads": -1,
        "key_heads": -2,
        "value_heads": -2,
        "softmax": -1,
    }
    x = torch.randn(2, 32, 64)
    assert module(x, x, x)[0].shape == x.shape
