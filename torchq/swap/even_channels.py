"""Factors of depthwise inputs as files and kernels have them: in the layer that makes the channels.

Calibration lets the quantizers of a depthwise layer multiply each channel of its input by a power
of two, and divide its weight by it; see :mod:`torchq.workflow.even_channels`. What lies between the
layer that makes the channels and this one keeps factors, or clips what the quantizer clips too. So
a file has the factors in the scales of the weight and in the bias of the layer in front: no code
changes, and nothing is multiplied beside layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchq.nn import TensorQuantizer
from torchq.nn.batchnorm_folding import OutputScaling
from torchq.nn.correction import fold_corrections_, folded_corrections
from torchq.swap.apply import recorded_plans
from torchq.utils import state_kept

M = TypeVar("M", bound=nn.Module)


def layers_with_even_channels(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return each layer that makes channels, and the depthwise one whose quantizers hold factors.

    Where the plan names a layer that is not there any more the factors stay a multiplication.
    """
    found = []
    for prefix, plan in recorded_plans(model):
        root = model.get_submodule(prefix)
        modules = dict(root.named_modules())
        for decision in plan.replaced:
            if decision.even is None:
                continue
            source = modules.get(decision.even.source)
            reader: Any = modules.get(decision.name)
            of_input = getattr(reader, "input_quantizer", None)
            holds = (
                isinstance(of_input, TensorQuantizer)
                and of_input.quantizing
                and of_input.pre_quant_scale is not None
            )
            if holds and isinstance(source, OutputScaling):
                found.append((source, reader))
    return found


def give_numbers_of_files_(model: M) -> M:
    """Do as :func:`as_in_files` for good; return the model."""
    fold_corrections_(model)
    for source, reader in layers_with_even_channels(model):
        _fold_(source, reader.input_quantizer)
    return model


@contextmanager
def as_in_files(
    model: nn.Module,
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Let layers have the numbers that files give them, inside a ``with`` block.

    These hold corrections and the factors of depthwise inputs. Yields a context manager, for blocks
    inside it, in which parameters and quantizers are those of the model.
    """
    with (
        folded_corrections(model) as uncorrected,
        _folded_even_channels(model) as uneven,
    ):

        @contextmanager
        def as_in_model() -> Iterator[None]:
            with uneven(), uncorrected():
                yield

        yield as_in_model


@contextmanager
def _folded_even_channels(
    model: nn.Module,
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Let layers have the factors of what reads them, inside a ``with`` block.

    Yields a context manager, for blocks inside it, in which the quantizers have them.
    """
    pairs = layers_with_even_channels(model)
    before = [
        (source, reader.input_quantizer, source.weight, source.bias)
        for source, reader in pairs
    ]
    factors = [quantizer.pre_quant_scale for _, quantizer, *_ in before]

    @contextmanager
    def unfolded() -> Iterator[None]:
        with ExitStack() as stack:
            for (source, quantizer, weight, bias), of_input in zip(
                before, factors, strict=True
            ):
                for holder, name, value in (
                    (source, "weight", weight),
                    (source, "bias", bias),
                    (quantizer, "pre_quant_scale", of_input),
                ):
                    stack.callback(setattr, holder, name, getattr(holder, name))
                    setattr(holder, name, value)
            yield

    with ExitStack() as stack:
        for source, reader in pairs:
            for module in (source, reader.input_quantizer):
                stack.enter_context(state_kept(module))
                for (
                    parameter
                ) in module.parameters():  # among them ranges that are learned
                    stack.callback(setattr, parameter, "data", parameter.data)
            _fold_(source, reader.input_quantizer)
        yield unfolded


def _fold_(source: Any, of_input: TensorQuantizer) -> None:
    """Multiply what a layer returns by the factors of the quantizer that reads it."""
    assert of_input.pre_quant_scale is not None
    factors: Tensor = of_input.pre_quant_scale.detach().flatten()
    with torch.no_grad():
        scaled = source.scale_weight_(source.per_weight(factors.double())).values
        source.weight = nn.Parameter(scaled, source.weight.requires_grad)
        if source.bias is not None:
            bias = source.bias * factors.to(source.bias)
            source.bias = nn.Parameter(bias, source.bias.requires_grad)
    of_input.pre_quant_scale = None
