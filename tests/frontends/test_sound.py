"""Fourier transforms and filters of ONNX files, against ONNX Runtime and its own formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchq
from tests.frontends.onnx_writer import Writer, assert_agrees


def sound(batch: int = 2, length: int = 400) -> Tensor:
    return torch.randn(batch, length, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("columns", [0, 1], ids=["(batch, time)", "(batch, time, 1)"])
@pytest.mark.parametrize("windowed", [True, False])
def test_short_time_transforms(columns: int, windowed: bool) -> None:
    """As speech recognizers compute their features: STFT, power, mel bands, logarithm."""
    w = Writer(17)
    x = w.input("x", ["n", "time", 1] if columns else ["n", "time"])
    window = w.node("HannWindow", w.constant(64)) if windowed else ""
    spectrum = w.node("STFT", x, w.constant(16), window, w.constant(64))
    power = w.node("ReduceSumSquare", spectrum, axes=[-1], keepdims=0)
    hertz = [w.constant(edge, torch.float32) for edge in (100.0, 4000.0)]
    mel = w.node("MelWeightMatrix", w.constant(20), w.constant(64), w.constant(16000), *hertz)
    bands = w.node("Clip", w.node("MatMul", power, mel), w.constant(1e-3, torch.float32))
    for length in (400, 333):
        given = sound(length=length)
        given = given.unsqueeze(2) if columns else given
        read = assert_agrees(w.model(w.node("Log", bands)), {"x": given})
    assert read(given).shape == (2, (333 - 64) // 16 + 1, 20)


@pytest.mark.parametrize("onesided", [0, 1])
def test_transforms_and_their_inverse(onesided: int) -> None:
    w = Writer(17)
    x = w.input("x", [2, 30, 1])
    spectrum = w.node("DFT", x, w.constant(32), axis=1, onesided=onesided)
    read = assert_agrees(w.model(spectrum), {"x": sound(length=30).unsqueeze(2)})
    assert read(sound(length=30).unsqueeze(2)).shape == (2, 17 if onesided else 32, 2)
    if not onesided:
        back = w.model(w.node("DFT", spectrum, axis=1, inverse=1))
        assert_agrees(back, {"x": sound(length=30).unsqueeze(2)})


def test_a_front_end_of_sound_is_exported_again(tmp_path: Path) -> None:
    w = Writer(17)
    spectrum = w.node("STFT", w.input("x", [1, 400]), w.constant(16), "", w.constant(64))
    power = w.node("ReduceSumSquare", spectrum, axes=[-1], keepdims=0)
    y = w.node("MatMul", power, w.random(33, 8, name="fc.weight"))
    read, x = torchq.from_onnx(w.model(y)), sound(1)
    torchq.quantize_(read)
    torchq.calibrate(read, [x], progress=False)
    torchq.export_onnx(read, x, tmp_path / "int8.onnx", opset=18)
    assert torchq.verify_onnx(read, tmp_path / "int8.onnx", [x]).ok


def test_sizes_that_no_sound_has_are_refused() -> None:
    w = Writer(17)
    x = w.input("x", [2, 30, 1])
    huge = torchq.from_onnx(w.model(w.node("DFT", x, w.constant(2**40), axis=1)))
    with pytest.raises(ValueError, match="got a size of 1099511627776; expected at most"):
        huge(torch.zeros(2, 30, 1))
    w = Writer(17)
    signal = w.input("x", [1, 8, 1])
    long = torchq.from_onnx(w.model(w.node("STFT", signal, w.constant(4), "", w.constant(9))))
    with pytest.raises(ValueError, match="got parts of 9 every 4 of 8 samples"):
        long(torch.zeros(1, 8, 1))
