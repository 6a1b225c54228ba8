"""Fourier transforms and spectra, as networks for sound hold them."""

import torch
from torch import Tensor

from torchq.frontends.building.graph import Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import NUMBERS, NodeContext, converter
from torchq.frontends.onnx.reader import dtype_of

_HALVES = (torch.float16, torch.bfloat16)


@converter("DFT")
def _dft(node: NodeContext) -> Value:
    # An attribute up to opset 19.
    axis = node.attr("axis", 1) if node.version < 20 else node.number(2)
    axis = -2 if axis is None else axis
    options = node.attr("inverse", False), node.attr("onesided", False)
    return node.call(dft, node.inputs[0], node.number(1), axis, *options)


def _complex(x: Tensor) -> Tensor:
    """Return numbers whose last dimension holds both parts, or the real part alone."""
    wide = x.float() if x.dtype in _HALVES else x
    return (
        wide[..., 0]
        if wide.shape[-1] == 1
        else torch.view_as_complex(wide.contiguous())
    )


@one_call
def dft(
    x: Tensor,
    length: Tensor | int | None,
    axis: Tensor | int,
    inverse: bool,
    onesided: bool,
) -> Tensor:
    """Return a Fourier transform along ``axis``; the last dimension holds both parts of numbers.

    ``onesided`` gives the first half of it, of which the inverse transform is real.
    """
    axis = int(axis)
    axis = axis + 1 if axis < 0 else axis
    numbers = _complex(x)
    if length is None:
        count = numbers.shape[axis]
        count = 2 * (count - 1) if inverse and onesided else count
    else:
        count = int(length)
    if not onesided:
        function = torch.fft.ifft if inverse else torch.fft.fft
        result = torch.view_as_real(function(numbers, count, axis))
    elif inverse:
        result = torch.fft.irfft(numbers, count, axis).unsqueeze(-1)
    else:
        result = torch.view_as_real(torch.fft.rfft(numbers, count, axis))
    return result.to(x.dtype)


@converter("STFT")
def _stft(node: NodeContext) -> Value:
    onesided = node.attr("onesided", True)
    shape = node.shape(0)
    if onesided and shape is not None and shape[-1] == 2:
        node.refuse(
            "its signal is complex, and its result onesided; expected one of both"
        )
    sizes = node.number(1), node.number(3)
    return node.call(stft, node.inputs[0], node.input(2), *sizes, onesided)


@one_call
def stft(
    signal: Tensor,
    window: Tensor | None,
    step: Tensor | int,
    length: Tensor | int | None,
    onesided: bool,
) -> Tensor:
    """Return Fourier transforms of frames, (batch, frames, frequencies, 2)."""
    if length is None:
        length = signal.shape[1] if window is None else window.shape[0]
    numbers = _complex(signal)
    frames = numbers.unfold(1, int(length), int(step))
    if window is not None:
        frames = frames * window.to(frames.real.dtype)
    result = torch.fft.rfft(frames) if onesided else torch.fft.fft(frames)
    return torch.view_as_real(result).to(signal.dtype)


@converter("MelWeightMatrix")
def _mel_weight_matrix(node: NodeContext) -> Value:
    dtype = dtype_of(node.attr("output_datatype", 1))
    if dtype not in NUMBERS:
        node.refuse("torch computes nothing with its elements")
    return node.call(mel_weight_matrix, *node.inputs, dtype)


@one_call
def mel_weight_matrix(
    bins: Tensor,
    length: Tensor,
    rate: Tensor,
    lowest: Tensor,
    highest: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return triangles on the mel scale, (frequencies, bins), whose peaks are 1."""
    count = int(bins)
    ends = torch.stack([lowest.reshape(()), highest.reshape(())]).double()
    low, high = 2595 * torch.log10(1 + ends / 700)
    steps = torch.arange(count + 2, dtype=torch.float64)
    edges = low + steps * ((high - low) / (count + 2))
    frequencies = 700 * (10 ** (edges / 2595) - 1)
    places = ((int(length) + 1) * frequencies).div(int(rate), rounding_mode="floor")
    rows = torch.arange(int(length) // 2 + 1, dtype=torch.float64).unsqueeze(1)
    before, middle, behind = places[:-2], places[1:-1], places[2:]
    rising = (rows - before) / (middle - before).clamp(min=1)
    falling = (behind - rows) / (behind - middle).clamp(min=1)
    result = torch.where(rows < middle, rising, falling)
    result = torch.where((rows < before) | (rows >= behind), 0, result)
    result = torch.where(rows == middle, 1, result)
    return result.to(dtype)


@converter(
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
    dtypes=None,
)
def _random(node: NodeContext) -> Value:
    node.refuse(
        "its results are random, so that no two runs of the file agree; expected a network that "
        "computes the same from the same inputs. Make the random numbers an input of the file"
    )
