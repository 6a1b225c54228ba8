"""Quantized recurrent layers and cells against torch's own cells on tensors quantized by hand."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import torchq
from tests.contracts.recurrent_reference import recurrent_by_hand
from torchq import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.nn import convert_

#: The loop and torch's kernels add the same products in another order. Ranges leave a margin, and
#: the data is float64, so that no value lies so near to a tie that this could flip a code.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False, "num_layers": 2},
]
CASES = [(cls, options) for cls in LAYERS for options in OPTIONS]
CASES += [
    (nn.LSTM, {"proj_size": 3, "num_layers": 2, "bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


def quantized(cls: type, options: dict[str, Any], learn: bool = False) -> Any:
    torch.manual_seed(0)
    input = QuantDescriptor(4, amax=1.7, learn_amax=learn)
    weight = QuantDescriptor(4, axis=0, learn_amax=learn)
    layer = convert_(cls(5, 7, **options).double(), input=input, weight=weight)
    for quantizer, tensor in layer.quantized_weights():  # type: ignore[operator]
        quantizer.calibrate_on(tensor)
    return layer


def sequence(batch_first: bool = False) -> Tensor:
    shape = (3, 6, 5) if batch_first else (6, 3, 5)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def by_hand(layer: Any, x: Tensor, state: Any, keep: Tensor | None = None) -> Any:
    """Return the outputs and the parts of the last state, with the quantizers of the layer."""
    y, last = recurrent_by_hand(
        layer, x, lambda s, t: layer.quantizer(s)(t), state, keep
    )
    return y, parts(last)


def assert_close(found: Any, expected: Any) -> None:
    """Compare outputs and last states."""
    (y, last), (other, ends) = found, expected
    torch.testing.assert_close(
        (y, *parts(last)),
        (other, *ends),
        **CLOSE,
    )


def as_given(state: tuple[Tensor, ...]) -> Any:
    """Return a state as torch's layer takes it."""
    return state if len(state) > 1 else state[0]


def zeros(layer: Any, rows: int) -> tuple[Tensor, ...]:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or layer.hidden_size]
    widths += [layer.hidden_size] if isinstance(layer, nn.LSTM) else []
    generator = torch.Generator().manual_seed(2)
    return tuple(
        torch.randn(count, rows, w, generator=generator, dtype=torch.float64)
        for w in widths
    )


def parts(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
@pytest.mark.parametrize("learn", [False, True], ids=["fixed", "learned"])
def test_results_and_gradients_are_those_by_hand(
    cls: type, options: dict[str, Any], learn: bool
) -> None:
    """Gradients of the given state too, which the last state has beside the outputs."""
    layer = quantized(cls, options, learn)
    grads = []
    for compute in (
        lambda x, state: layer(x, as_given(state)),
        partial(by_hand, layer),
    ):
        x = sequence(layer.batch_first)
        state = tuple(part.requires_grad_() for part in zeros(layer, 3))
        actual, last = compute(x, state)
        weight = torch.linspace(-1, 1, actual.numel(), dtype=torch.float64).view_as(
            actual
        )
        loss = (actual * weight).sum() + sum(
            part.square().sum() for part in parts(last)
        )
        layer.zero_grad()
        loss.backward()
        tensors = {"x": x, **dict(enumerate(state)), **dict(layer.named_parameters())}
        grads.append({name: tensor.grad.clone() for name, tensor in tensors.items()})
        grads[-1]["results"] = torch.cat(
            [t.flatten() for t in (actual, *parts(last))]
        ).detach()
    for name, one in grads[0].items():
        # Ranges are float32; the reference adds their gradients up step by step.
        close = {"rtol": 1e-5, "atol": 1e-5} if one.dtype is torch.float32 else CLOSE
        torch.testing.assert_close(
            one,
            grads[1][name],
            **close,
            msg=str(name),
        )
    torch.testing.assert_close(
        grads[0]["results"],
        grads[1]["results"],
        **CLOSE,
    )


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_packed_sequences(cls: type, options: dict[str, Any]) -> None:
    layer = quantized(cls, {**options, "batch_first": False})
    x = sequence().detach()
    state = zeros(layer, 3)
    lengths = [2, 6, 3]
    packed = pack_sequence(
        [x[:n, i] for i, n in enumerate(lengths)], enforce_sorted=False
    )
    actual, last = layer(packed, as_given(state))
    assert isinstance(actual, PackedSequence)
    keep = torch.arange(6).unsqueeze(1) < torch.tensor(lengths)
    expected = by_hand(layer, x * keep.unsqueeze(2), state, keep)
    assert_close((pad_packed_sequence(actual)[0], last), expected)


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_with_a_float_hidden_state_the_fused_kernel_gives_the_same(
    cls: type, options: dict[str, Any]
) -> None:
    layer = quantized(cls, options)
    for slot in layer.all_slots():
        if slot.startswith(("hidden", "projected")):
            layer.quantizer(slot).mode = "off"
    x = sequence(layer.batch_first).detach()
    state = zeros(layer, 3)
    assert_close(
        layer(x, as_given(state)),
        by_hand(layer, x, state),
    )


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_one_sequence_without_a_batch_and_every_quantizer_counts(
    cls: type, options: dict[str, Any]
) -> None:
    layer = quantized(cls, options)
    x = sequence().detach()[:, 0]
    y, last = layer(x)
    batch_dim = 0 if layer.batch_first else 1
    batched, ends = layer(x.unsqueeze(batch_dim))
    torch.testing.assert_close(y, batched.squeeze(batch_dim), **CLOSE)
    assert [p.shape for p in parts(last)] == [p.squeeze(1).shape for p in parts(ends)]
    for slot in layer.all_slots():
        layer.quantizer(slot).mode = "off"
    plain = layer(x)[0]
    for slot in layer.all_slots():
        layer.quantizer(slot).mode = "quantize"
        assert not torch.equal(layer(x)[0], plain), slot
        layer.quantizer(slot).mode = "off"


@pytest.mark.parametrize("cls", LAYERS)
def test_calibration_sees_every_hidden_state(cls: type) -> None:
    """The range of a hidden state is that of the operands: the given state and all but the last."""
    layer = convert_(
        cls(5, 7, bidirectional=True),
        input=QuantDescriptor(),
    )
    x = sequence().detach().float()
    with torch.no_grad():
        plain = cls(5, 7, bidirectional=True)
        plain.load_state_dict(layer.state_dict(), strict=False)
        outputs = plain(x)[0]
    torchq.calibrate(layer, [x], progress=False)
    expected = (outputs[:-1, :, :7].abs().max(), outputs[1:, :, 7:].abs().max())
    actual = (layer.hidden_l0_quantizer.amax, layer.hidden_l0_reverse_quantizer.amax)
    torch.testing.assert_close(actual, expected)


def test_dropout_between_levels_is_off_in_eval_mode() -> None:
    layer = quantized(nn.GRU, {"num_layers": 2, "dropout": 0.5})
    x = sequence().detach()
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(
        layer(x)[0],
        layer(x)[0],
    )


def test_unsigned_inputs_keep_a_signed_hidden_state() -> None:
    layer: Any = convert_(
        nn.LSTM(5, 7),
        input=QuantDescriptor(unsigned=True),
    )
    assert layer.input_l0_quantizer.descriptor.unsigned is True
    assert layer.hidden_l0_quantizer.descriptor.unsigned is False


def test_autocast_trains() -> None:
    layer: Any = convert_(
        nn.LSTM(5, 7), input=QuantDescriptor(), weight=QuantDescriptor(axis=0)
    )
    x = sequence().detach().float()
    torchq.calibrate(layer, [x], progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    y.float().sum().backward()
    assert all(
        p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters()
    )


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("hidden", ["quantize", "off"])
def test_no_rows_and_no_steps(cls: type, hidden: str) -> None:
    layer = quantized(cls, {"bidirectional": True})
    for end in layer.suffixes(0):
        layer.quantizer(f"hidden{end}").mode = hidden
    actual, _ = layer(torch.zeros(3, 0, 5, dtype=torch.float64))
    assert actual.shape == (3, 0, 14)
    with pytest.raises(
        QuantizationError, match="got a sequence of 0 steps; expected at least"
    ):
        layer(torch.zeros(0, 2, 5, dtype=torch.float64))
