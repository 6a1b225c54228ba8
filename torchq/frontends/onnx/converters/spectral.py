"""Operators for sound: Fourier transforms, windows, and filter banks of the mel scale."""

from __future__ import annotations

import torch

from torchq.frontends.building import Value
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.functions import spectral
from torchq.frontends.onnx.reader import dtype_of
from torchq.frontends.onnx.registry import converter

__all__ = []

_COEFFICIENTS = {
    "HannWindow": [0.5, 0.5],
    "HammingWindow": [25 / 46, 21 / 46],
    "BlackmanWindow": [0.42, 0.5, 0.08],
}


@converter("HannWindow", "HammingWindow", "BlackmanWindow")
def _window(node: NodeContext) -> Value:
    dtype = dtype_of(node.attr("output_datatype", 1)) or torch.float32
    factors, periodic = _COEFFICIENTS[node.op_type], bool(node.attr("periodic", 1))
    return node.call(spectral.cosine_window, node.inputs[0], factors, periodic, dtype)


@converter("DFT")
def _dft(node: NodeContext) -> Value:
    axis = _number(node, 2)
    if axis is None:
        axis = node.attr("axis", 1) if node.version < 20 else -2
    flags = bool(node.attr("inverse", 0)), bool(node.attr("onesided", 0))
    return node.call(spectral.dft, node.inputs[0], _number(node, 1), axis, *flags)


@converter("STFT")
def _stft(node: NodeContext) -> Value:
    onesided = bool(node.attr("onesided", 1))
    hop, length = _number(node, 1), _number(node, 3)
    return node.call(spectral.stft, node.inputs[0], hop, node.input(2), length, onesided)


@converter("MelWeightMatrix")
def _mel_weights(node: NodeContext) -> Value:
    dtype = dtype_of(node.attr("output_datatype", 1)) or torch.float32
    return node.call(spectral.mel_weights, *node.inputs, dtype)


def _number(node: NodeContext, index: int) -> Value | int:
    """Return an input of one integer: a number where it is known."""
    known = node.constant(index)
    return node.input(index) if known is None else int(known)
