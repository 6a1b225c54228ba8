"""Quantized recurrent layers and cells against torch's own cells on tensors quantized by hand."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import torchq
from tests.contracts.recurrent_reference import after_products
from torchq import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.formats import PerAxis
from torchq.functional import fake_quantize, reduce_amax
from torchq.nn import TensorQuantizer, convert_, revert_

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
CELLS: dict[type, type] = {nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell, nn.RNN: nn.RNNCell}


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


def by_hand(layer: Any, x: Tensor, state: tuple[Tensor, ...], keep: Tensor) -> Any:
    """Return the outputs and the last state of a padded (T, N, C) input, by torch's cells.

    ``keep`` (T, N) tells which elements are no padding; a row's state stays where it is padding.
    """
    ends: list[tuple[Tensor, ...]] = []
    x = layer.input_l0_quantizer(x)
    for level in range(layer.num_layers):
        if level:
            x = layer.quantizer(f"input_l{level}")(x)
        outputs = [direction(layer, x, state, end, keep, ends) for end in layer.suffixes(level)]
        x = torch.cat(outputs, -1)
    return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


def direction(
    layer: Any, x: Tensor, state: Any, end: str, keep: Tensor, ends: list[tuple[Tensor, ...]]
) -> Tensor:
    own = tuple(part[len(ends)] for part in state)
    cell: Any = CELLS[type(layer).float_class](x.shape[-1], layer.hidden_size, layer.bias).double()
    if isinstance(layer, nn.RNN):
        cell.nonlinearity = layer.nonlinearity
    parameters = {
        f"{kind}": layer.quantizer(f"{kind}{end}")(getattr(layer, f"{kind}{end}"))
        for kind in ("weight_ih", "weight_hh")
    }
    for kind in ("bias_ih", "bias_hh") if layer.bias else ():
        parameters[kind] = getattr(layer, f"{kind}{end}")
    steps = range(len(x))
    outputs: list[Any] = [None] * len(x)
    for step in reversed(steps) if end.endswith("reverse") else steps:
        hidden = layer.quantizer(f"hidden{end}")(own[0])
        new = call_cell(cell, parameters, x[step], hidden, own)
        if layer.proj_size:
            weight = layer.quantizer(f"weight_hr{end}")(getattr(layer, f"weight_hr{end}"))
            new = (F.linear(layer.quantizer(f"projected{end}")(new[0]), weight), new[1])
        rows = keep[step].unsqueeze(1)
        own = tuple(torch.where(rows, n, o) for n, o in zip(new, own, strict=True))
        outputs[step] = torch.where(rows, new[0], torch.zeros_like(new[0]))
    ends.append(own)
    return torch.stack(outputs)


def call_cell(cell: Any, parameters: Any, x: Tensor, hidden: Tensor, own: Any) -> Any:
    """Run torch's cell with the hidden state quantized inside the product alone."""
    if isinstance(cell, nn.RNNCell):
        return (torch.func.functional_call(cell, parameters, (x, hidden)),)
    i = F.linear(x, parameters["weight_ih"], parameters.get("bias_ih"))
    h = F.linear(hidden, parameters["weight_hh"], parameters.get("bias_hh"))
    return after_products(cell, i, h, own)


def zeros(layer: Any, rows: int) -> tuple[Tensor, ...]:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or layer.hidden_size]
    widths += [layer.hidden_size] if isinstance(layer, nn.LSTM) else []
    generator = torch.Generator().manual_seed(2)
    return tuple(
        torch.randn(count, rows, w, generator=generator, dtype=torch.float64) for w in widths
    )


def parts(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
@pytest.mark.parametrize("learn", [False, True], ids=["fixed", "learned"])
def test_results_and_gradients_are_those_by_hand(
    cls: type, options: dict[str, Any], learn: bool
) -> None:
    layer = quantized(cls, options, learn)
    x, y = (sequence(layer.batch_first) for _ in range(2))
    state = zeros(layer, 3)
    found, last = layer(x, state if len(state) > 1 else state[0])
    weight = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    (found * weight).sum().backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    steps = y.transpose(0, 1) if layer.batch_first else y
    expected, ends = by_hand(layer, steps, state, torch.ones(6, 3, dtype=torch.bool))
    expected = expected.transpose(0, 1) if layer.batch_first else expected
    torch.testing.assert_close(found, expected, **CLOSE)
    for one, other in zip(parts(last), ends, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    (expected * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **CLOSE)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_gradients_reach_the_given_state(cls: type, options: dict[str, Any]) -> None:
    """The last state has gradients too, beside the outputs."""
    layer = quantized(cls, options)
    x = sequence(layer.batch_first).detach()
    found = tuple(part.requires_grad_() for part in zeros(layer, 3))
    _, last = layer(x, found if len(found) > 1 else found[0])
    sum(part.square().sum() for part in parts(last)).backward()  # type: ignore[union-attr]
    expected = tuple(part.requires_grad_() for part in zeros(layer, 3))
    steps = x.transpose(0, 1) if layer.batch_first else x
    _, ends = by_hand(layer, steps, expected, torch.ones(6, 3, dtype=torch.bool))
    sum(part.square().sum() for part in ends).backward()  # type: ignore[union-attr]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_packed_sequences(cls: type, options: dict[str, Any]) -> None:
    layer = quantized(cls, options)
    x = sequence().detach()
    lengths = [2, 6, 3]
    packed = pack_sequence([x[:n, i] for i, n in enumerate(lengths)], enforce_sorted=False)
    state = zeros(layer, 3)
    found, last = layer(packed, state if len(state) > 1 else state[0])
    assert isinstance(found, PackedSequence)
    keep = torch.arange(6).unsqueeze(1) < torch.tensor(lengths)
    expected, ends = by_hand(layer, x * keep.unsqueeze(2), state, keep)
    torch.testing.assert_close(pad_packed_sequence(found)[0], expected, **CLOSE)
    for one, other in zip(parts(last), ends, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_with_a_float_hidden_state_the_fused_kernel_gives_the_same(
    cls: type, options: dict[str, Any]
) -> None:
    layer = quantized(cls, options)
    for slot in layer.all_slots():
        if slot.startswith(("hidden", "projected")):
            layer.quantizer(slot).mode = "off"
    x, state = sequence(layer.batch_first).detach(), zeros(layer, 3)
    found, last = layer(x, state if len(state) > 1 else state[0])
    steps = x.transpose(0, 1) if layer.batch_first else x
    expected, ends = by_hand(layer, steps, state, torch.ones(6, 3, dtype=torch.bool))
    expected = expected.transpose(0, 1) if layer.batch_first else expected
    torch.testing.assert_close(found, expected, **CLOSE)
    for one, other in zip(parts(last), ends, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_off_is_torch(cls: type, options: dict[str, Any]) -> None:
    """Bit for bit, and the state dict has torch's keys beside those of the ranges."""
    layer = quantized(cls, options)
    plain = cls(5, 7, **options).double()
    own = {key: value for key, value in layer.state_dict().items() if "quantizer" not in key}
    assert list(own) == list(plain.state_dict())
    plain.load_state_dict(own)
    for part in layer.modules():
        if isinstance(part, TensorQuantizer):
            part.mode = "off"
    x = sequence()
    found, expected = layer(x), plain(x)
    assert torch.equal(found[0], expected[0])
    assert all(map(torch.equal, parts(found[1]), parts(expected[1])))


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
def test_a_converted_layer_is_copied_pickled_and_reverted(cls: type) -> None:
    layer = quantized(cls, {"num_layers": 2, "bidirectional": True})
    x = sequence().detach()
    expected = layer(x)[0]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x)[0], expected)
    names = set(dict(cls(5, 7, 2, bidirectional=True).named_children()))
    assert type(revert_(layer)) is cls
    assert set(dict(layer.named_children())) == names


@pytest.mark.parametrize("cls", LAYERS)
def test_calibration_sees_every_hidden_state(cls: type) -> None:
    """The range of a hidden state is that of the operands: the given state and all but the last."""
    layer = convert_(cls(5, 7, bidirectional=True), input=QuantDescriptor())
    x = sequence().detach().float()
    with torch.no_grad():
        plain = cls(5, 7, bidirectional=True)
        plain.load_state_dict(layer.state_dict(), strict=False)
        outputs = plain(x)[0]
    torchq.calibrate(layer, [x], progress=False)
    expected = (outputs[:-1, :, :7].abs().max(), outputs[1:, :, 7:].abs().max())
    found = (layer.hidden_l0_quantizer.amax, layer.hidden_l0_reverse_quantizer.amax)
    torch.testing.assert_close(found, expected)


def test_dropout_between_levels_is_off_in_eval_mode() -> None:
    layer = quantized(nn.GRU, {"num_layers": 2, "dropout": 0.5})
    x = sequence().detach()
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_unsigned_inputs_keep_a_signed_hidden_state() -> None:
    layer: Any = convert_(nn.LSTM(5, 7), input=QuantDescriptor(unsigned=True))
    assert layer.input_l0_quantizer.descriptor.unsigned is True
    assert layer.hidden_l0_quantizer.descriptor.unsigned is False


def test_weights_are_quantized_per_row_of_each_gate_matrix() -> None:
    layer = quantized(nn.LSTM, {})
    weight = layer.weight_hh_l0
    expected = fake_quantize(
        weight,
        reduce_amax(weight, PerAxis((0,))).float(),
        layer.weight_hh_l0_quantizer.descriptor.format,
        PerAxis((0,)),
    )
    assert torch.equal(layer.weight_hh_l0_quantizer(weight), expected)


def test_autocast_trains() -> None:
    layer: Any = convert_(nn.LSTM(5, 7), input=QuantDescriptor(), weight=QuantDescriptor(axis=0))
    x = sequence().detach().float()
    torchq.calibrate(layer, [x], progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    y.float().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("hidden", ["quantize", "off"])
def test_no_rows_and_no_steps(cls: type, hidden: str) -> None:
    layer = quantized(cls, {"bidirectional": True})
    for end in layer.suffixes(0):
        layer.quantizer(f"hidden{end}").mode = hidden
    found, _ = layer(torch.zeros(3, 0, 5, dtype=torch.float64))
    assert found.shape == (3, 0, 14)
    with pytest.raises(QuantizationError, match="got a sequence of 0 steps; expected at least"):
        layer(torch.zeros(0, 2, 5, dtype=torch.float64))
