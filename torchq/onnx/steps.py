"""Recurrent layers that a file computes step by step, for the length of the example alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils.rnn import PackedSequence

from torchq.errors import ExportError
from torchq.graph import tensors_in
from torchq.nn import QuantRecurrent
from torchq.onnx.trial import run_in_float


def warn_of_steps(
    model: nn.Module,
    example: object,
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None,
) -> bool:
    """Say how many steps of recurrent layers a file will have, before it is written.

    A layer whose hidden state is quantized has each of its steps in the file. The model runs once,
    in float, if it has such layers; an error of its own is left to the export.

    Returns:
        True if the first dimension of an input counts these steps, and so is no batch.

    Raises:
        ExportError: ``dynamic_shapes`` opens another dimension than the batch, although the file
            takes the length of the example alone.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantRecurrent) and module.has_quantized_state
    }
    if not layers:
        return False
    steps: dict[str, int] = {}
    rows: dict[str, int] = {}
    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(partial(_note, steps, rows, name))
            stack.callback(handle.remove)
        stack.enter_context(suppress(Exception))  # A model may raise anything.
        run_in_float(model, example)
    if not steps:
        return False
    counts = ", ".join(f"{name} ({count} steps)" for name, count in steps.items())
    opened: list[str] = []
    for name, dimensions in (dynamic_shapes or {}).items():
        opened += [f"{name}: {dimension}" for dimension in dimensions if dimension]
    remedy = (
        "With a float hidden state a level is one node in float, of any length: export and "
        'verify in `with torchq.disabled(model, "*.hidden_*"):`'
    )
    if opened:
        raise ExportError(
            f"export_onnx: {counts}: got dynamic_shapes that open {', '.join(sorted(opened))}; "
            "expected the batch alone, since the hidden state is quantized, so that the file has "
            f"each step. {remedy}"
        )
    warnings.warn(
        f"export_onnx: {counts}: the hidden state is quantized, so the file has nodes for each "
        f"step, and takes sequences of this length alone. {remedy}",
        stacklevel=3,
    )
    lengths = {tensor.shape[0] for tensor in tensors_in(example) if tensor.dim() > 1}
    return any(
        count in lengths and rows.get(name, count) not in lengths
        for name, count in steps.items()
    )


def _note(
    steps: dict[str, int],
    rows: dict[str, int],
    name: str,
    layer: QuantRecurrent,
    args: Any,
) -> None:
    """Note the number of steps of a call, and of rows where it says it.

    It is one sequence where it has two dimensions.
    """
    sequence = args[0]
    if isinstance(sequence, PackedSequence):
        steps[name] = len(sequence.batch_sizes)
        return
    has_batch_first = layer.batch_first and sequence.dim() > 2
    steps[name] = int(sequence.shape[1 if has_batch_first else 0])
    if sequence.dim() > 2:
        rows[name] = int(sequence.shape[0 if has_batch_first else 1])
