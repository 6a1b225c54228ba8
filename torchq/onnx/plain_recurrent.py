"""How ``nn.RNN`` is written by the exporter that is based on ``torch.export``: a node a level.

torch translates LSTM and GRU so, and unrolls this one into its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torchq.utils.optional import import_optional


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return ``custom_translation_table`` for ``torch.onnx.export``."""
    return {
        torch.ops.aten.rnn_tanh.input: partial(_rnn, activation="Tanh"),
        torch.ops.aten.rnn_relu.input: partial(_rnn, activation="Relu"),
    }


def _rnn(
    x: Any,
    hx: Any,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    activation: str,
) -> tuple[Any, Any]:
    """Return the results of a layer, as nodes of a graph.

    The arguments are those of ``torch.rnn_tanh`` and ``torch.rnn_relu``.

    Args:
        x: (steps, N, in), or (N, steps, in) if ``batch_first``.
        hx: the first states, (levels * directions, N, hidden).
        params: for each level and direction the weights (hidden, in) and (hidden, hidden), and two
            biases (hidden,) if there are any.
        has_biases: there are biases.
        num_layers: how many levels there are.
        dropout: between levels while a model trains, so not in a file.
        train: the model trains, which a file does not.
        bidirectional: there are two directions.
        batch_first: N is the first dimension of inputs and results.
        activation: "Tanh" or "Relu".

    Returns:
        (steps, N, directions * hidden), or with N in front; and the last states, like ``hx``.
    """
    op = import_optional("onnxscript", "export_onnx(dynamo=True)").opset18
    directions = 2 if bidirectional else 1
    count = 4 if has_biases else 2
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    last_states = []
    for level in range(num_layers):
        first = level * directions
        parts = [
            params[i * count : (i + 1) * count]
            for i in range(first, first + directions)
        ]

        def stacked(place: int, parts: Sequence[Any] = parts) -> Any:
            rows = [op.Unsqueeze(part[place], [0]) for part in parts]
            return op.Concat(*rows, axis=0)

        bias = op.Concat(stacked(2), stacked(3), axis=1) if has_biases else None
        states = op.Slice(hx, [first], [first + directions], [0])
        results, last_state = op.RNN(
            x,
            stacked(0),
            stacked(1),
            bias,
            None,
            states,
            activations=[activation] * directions,
            direction="bidirectional" if bidirectional else "forward",
            hidden_size=params[1].shape[-1],
        )
        # (steps, directions, N, hidden)
        x = op.Reshape(op.Transpose(results, perm=[0, 2, 1, 3]), [0, 0, -1])
        last_states.append(last_state)
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    return x, op.Concat(*last_states, axis=0)
