"""QuantLSTM and QuantLSTMCell against torch's own on tensors quantized by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from torchq.compat.pytorch_quantization.nn import QuantLSTM, QuantLSTMCell
from torchq.compat.pytorch_quantization.nn.modules import quant_rnn
from torchq.compat.pytorch_quantization.tensor_quant import (
    QuantDescriptor,
    fake_tensor_quant,
)

# The loop and torch's kernel add the same products in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def off(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if "quantizer" in name:
            child.disable()  # type: ignore[operator]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, **CLOSE)


def jointly(bits: int, *tensors: Tensor) -> list[Tensor]:
    amax = max(t.abs().max() for t in tensors)
    return [fake_tensor_quant(t, amax, bits, False, False) for t in tensors]


def replace_jointly(bits: int, *weights: Tensor) -> None:
    with torch.no_grad():
        for weight, quantized in zip(weights, jointly(bits, *weights), strict=True):
            weight.copy_(quantized)


def described(bits_input: int, bits_weight: int) -> dict[str, Any]:
    given = {"input": bits_input, "weight": bits_weight}
    return {f"quant_desc_{slot}": QuantDescriptor(bits) for slot, bits in given.items()}


MODES: list[dict[str, Any]] = [
    {},
    {"num_layers": 2},
    {"bias": False},
    {"batch_first": True},
    {"bidirectional": True},
    {"num_layers": 3, "bidirectional": True, "batch_first": True, "bias": False},
]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("given", [True, False])
def test_without_quantization_it_is_torchs(
    options: dict[str, Any], given: bool
) -> None:
    layer = QuantLSTM(5, 7, **options)
    plain = nn.LSTM(5, 7, **options)
    assert list(layer.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    off(layer)
    x = torch.randn(4, 3, 5)
    batch = 4 if options.get("batch_first") else 3
    count = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    hx = (torch.randn(count, batch, 7), torch.randn(count, batch, 7)) if given else None
    close(layer(x, hx), plain(x, hx))
    single = None if hx is None else (hx[0][:, 0], hx[1][:, 0])
    close(
        layer(x[0], single),
        plain(x[0], single),
    )  # one sequence, without a batch


@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "num_layers": 2}], ids=str
)
def test_packed_sequences(options: dict[str, Any]) -> None:
    layer = QuantLSTM(5, 7, **options)
    plain = nn.LSTM(5, 7, **options)
    plain.load_state_dict(layer.state_dict())
    off(layer)
    sorted_ = pack_sequence([torch.randn(n, 5) for n in (6, 4, 4, 1)])
    shuffled = pack_padded_sequence(
        torch.randn(6, 4, 5), [2, 6, 1, 5], enforce_sorted=False
    )
    count = 4 if options else 1
    states = torch.randn(count, 4, 7), torch.randn(count, 4, 7)
    for packed, hx in ((sorted_, None), (shuffled, None), (shuffled, states)):
        actual = layer(packed, hx)
        expected = plain(packed, hx)
        close(actual[0].data, expected[0].data)
        close(actual[1], expected[1])
        assert actual[0].batch_sizes.equal(expected[0].batch_sizes)


@pytest.mark.parametrize(
    ("bits_input", "bits_weight"),
    [(6, 6), (8, 4)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_quantized_lstm(bits_input: int, bits_weight: int, bias: bool) -> None:
    """Input and hidden state share a range, and so do the two weights; the rest stays float."""
    descriptors = described(bits_input, bits_weight)
    layer = QuantLSTM(9, 7, bias=bias, **descriptors)
    plain = nn.LSTM(9, 7, bias=bias)
    plain.load_state_dict(layer.state_dict())
    replace_jointly(bits_weight, *plain.all_weights[0][:2])
    x = torch.randn(1, 4, 9)
    h = torch.randn(1, 4, 7)
    c = torch.randn(1, 4, 7)
    quantized_x, quantized_h = jointly(bits_input, x, h)
    close(
        layer(x, (h, c)),
        plain(quantized_x, (quantized_h, c)),
    )


def test_quantized_cell() -> None:
    cell = QuantLSTMCell(9, 7, **described(5, 4))
    plain = nn.LSTMCell(9, 7)
    assert list(cell.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(cell.state_dict())
    replace_jointly(4, plain.weight_ih, plain.weight_hh)
    x = torch.randn(4, 9)
    h = torch.randn(4, 7)
    c = torch.randn(4, 7)
    quantized_x, quantized_h = jointly(5, x, h)
    close(
        cell(x, (h, c)),
        plain(quantized_x, (quantized_h, c)),
    )
    off(cell)
    plain.load_state_dict(cell.state_dict())
    close(cell(x), plain(x))
    close(
        cell(x[0], (h[0], c[0])),
        plain(x[0], (h[0], c[0])),
    )


def test_calibrated_lstm_keeps_its_ranges() -> None:
    layer = QuantLSTM(4, 3, 2)
    for module in layer.modules():
        if isinstance(module, quant_rnn.QuantMixin | nn.ModuleList):
            continue
        module.disable_quant()
        module.enable_calib()
    layer(torch.randn(6, 2, 4))
    for module in [*layer._input_quantizers, *layer._weight_quantizers]:
        module.load_calib_amax()
        module.enable_quant()
    assert layer._weight_quantizers[0].amax.shape == (12, 1)
    assert layer._input_quantizers[1].amax.shape == ()
    keys = {
        f"_{kind}_quantizers.{i}._amax" for kind in ("input", "weight") for i in (0, 1)
    }
    assert set(layer.state_dict()) - set(nn.LSTM(4, 3, 2).state_dict()) == keys
    other = QuantLSTM(4, 3, 2)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(6, 2, 4)
    close(other(x), layer(x))


def test_training_and_dropout() -> None:
    layer = QuantLSTM(4, 3, 2, dropout=0.5)
    x = torch.randn(6, 2, 4)
    assert not layer(x)[0].equal(layer(x)[0])
    layer.eval()
    assert layer(x)[0].equal(layer(x)[0])
    layer(x)[0].sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in layer.parameters()
    )


def test_errors() -> None:
    with pytest.raises(ValueError, match="proj_size=2; expected 0"):
        QuantLSTM(4, 5, proj_size=2)
    with pytest.raises(ValueError, match="expected"):
        QuantLSTM(4, 5)(torch.randn(3, 2, 6))
    with pytest.raises(ValueError, match="expected"):
        QuantLSTM(4, 5)(
            torch.randn(3, 2, 4), (torch.zeros(1, 9, 5), torch.zeros(1, 9, 5))
        )
