"""Fourier transforms, windows and filter banks of ONNX's operators for sound."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["cosine_window", "dft", "mel_weights", "stft"]

#: mel(f) = 2595 log10(1 + f / 700)
_MEL_FACTOR, _MEL_OFFSET = 2595.0, 700.0
#: Largest sizes of what files may ask for: a second of sound at 16 kHz needs a hundredth of it.
_LARGEST = 2**24


def cosine_window(
    size: Tensor, coefficients: list[float], periodic: bool, dtype: torch.dtype
) -> Tensor:
    """Return ``a0 - a1 cos(t) + a2 cos(2 t) ...`` over one period of ``size`` samples."""
    count = _checked(int(size))
    angle = (
        2
        * torch.pi
        * torch.arange(count, dtype=torch.float64)
        / (count if periodic else max(count - 1, 1))
    )
    total = torch.zeros(count, dtype=torch.float64)
    for order, factor in enumerate(coefficients):
        total += (-1) ** order * factor * torch.cos(order * angle)
    return total.to(dtype)


def dft(
    x: Tensor, length: Tensor | int | None, axis: Tensor | int, inverse: bool, onesided: bool
) -> Tensor:
    """Return the discrete Fourier transform of ``x``, or its inverse.

    Args:
        x: (..., 1) for real numbers, (..., 2) for complex ones.
        length: of the transform; None is the size of ``x``.
        axis: of ``x``; its last dimension counts.
        inverse: divide by the length, and turn the other way.
        onesided: give the first half of the spectrum, or read it and give real numbers.

    Returns:
        The shape of ``x`` with another size at ``axis``; (..., 1) for real numbers.
    """
    place = int(axis) % x.dim()
    size = None if length is None else _checked(int(length))
    values = _numbers(x)
    if inverse and onesided:
        return torch.fft.irfft(values, size, place).unsqueeze(-1).to(x.dtype)
    if inverse:
        return _pairs(torch.fft.ifft(values, size, place), x)
    if onesided and not values.is_complex():
        return _pairs(torch.fft.rfft(values, size, place), x)
    result = torch.fft.fft(values, size, place)
    half = result.shape[place] // 2 + 1 if onesided else result.shape[place]
    return _pairs(result.narrow(place, 0, half), x)


def stft(
    signal: Tensor,
    hop: Tensor | int,
    window: Tensor | None,
    length: Tensor | int | None,
    onesided: bool,
) -> Tensor:
    """Return the Fourier transforms of overlapping parts of a signal.

    Args:
        signal: (batch, time, 1) for real numbers, (batch, time, 2) for complex ones; files have
            real ones as (batch, time) too, which ONNX Runtime accepts.
        hop: between the parts.
        window: (length,) factors of each part; None is ones.
        length: of each part; None is that of the window, else of the signal.
        onesided: give the first half of each spectrum.

    Returns:
        (batch, parts, frequencies, 2)
    """
    signal = signal.unsqueeze(2) if signal.dim() == 2 else signal
    if length is None:
        length = signal.shape[1] if window is None else window.shape[0]
    size = int(length)
    if size < 1 or int(hop) < 1 or size > signal.shape[1]:
        raise ValueError(
            f"STFT: got parts of {size} every {int(hop)} of {signal.shape[1]} samples; expected "
            "positive numbers, and parts no longer than the signal"
        )
    parts = signal.unfold(1, size, int(hop))  # (batch, parts, 1 or 2, length)
    if window is not None:
        parts = parts * window
    return dft(parts.transpose(2, 3), None, 2, False, onesided)


def mel_weights(
    bins: Tensor, length: Tensor, rate: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the triangles that sum a spectrum into bands of the mel scale.

    Reference: the operator MelWeightMatrix of ONNX.

    Args:
        bins: the number of bands.
        length: of the transform that gave the spectrum.
        rate: samples in a second.
        low: of the lowest band, in hertz.
        high: of the highest band, in hertz.
        dtype: of the result.

    Returns:
        (length // 2 + 1, bins), each column with a peak of 1.
    """
    count, rows = int(bins), int(length) // 2 + 1
    _checked(count * rows)
    ends = [_MEL_FACTOR * math.log10(1 + float(edge) / _MEL_OFFSET) for edge in (low, high)]
    width = (ends[1] - ends[0]) / (count + 2)
    mels = [ends[0] + number * width for number in range(count + 2)]
    hertz = [_MEL_OFFSET * (10 ** (mel / _MEL_FACTOR) - 1) for mel in mels]
    places = [int((int(length) + 1) * frequency // int(rate)) for frequency in hertz]
    weights = torch.zeros(rows, count, dtype=torch.float64)
    for band in range(count):
        left, middle, right = places[band : band + 3]
        weights[middle, band] = 1
        for row in range(left, middle):
            weights[row, band] = (row - left) / (middle - left)
        for row in range(middle + 1, right):
            weights[row, band] = (right - row) / (right - middle)
    return weights.to(dtype)


def _numbers(x: Tensor) -> Tensor:
    """Return pairs (..., 2) as complex numbers, and (..., 1) as real ones."""
    wide = x if x.dtype is torch.float64 else x.float()
    if x.shape[-1] == 1:
        return wide[..., 0]
    return torch.complex(wide[..., 0], wide[..., 1])


def _pairs(values: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_real(values).to(like.dtype)


def _checked(size: int) -> int:
    """Return a size that a file asks for; one beyond all sound is an error."""
    if not 0 <= size <= _LARGEST:
        raise ValueError(f"got a size of {size}; expected at most {_LARGEST}")
    return size
