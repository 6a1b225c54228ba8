"""What converting a network promises: nothing is lost, on an engine neither, and no fit harms.

1. With every quantizer off a converted network computes what it computed before, bit for bit, on
   the example and on another input, in two calls one after the other (:func:`lost_by_conversion`).
   With every quantizer on it is near that (:func:`lost_by_quantizers`): what a forward does in
   place may be lost on tensors that quantizers return.
2. On integer kernels it computes what the simulation does on an input that deployment has not seen
   (:func:`lost_on_an_engine`).
3. The correction of results makes no output worse that it was compared on
   (:func:`harm_of_correction`).

Each function returns what is wrong, or "".
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ExportError
from torchq.graph import with_copies
from torchq.lowering.kernel import saturates
from torchq.nn import switched_off
from torchq.swap.same_results import difference, leaves
from torchq.utils import random_kept, unfused_attention

#: Kernels round sums at ties in another way, so some codes differ by one. Each moves a result by a
#: step of a range in 255 steps; a network of a few layers keeps far more than this.
LEAST_DB = 40.0
#: Rounding to 8 bits leaves 27 dB and more of each of these networks; a lost effect less than 10.
LEAST_DB_OF_8_BITS = 20.0
#: Weights that this CPU multiplies without an overflow.
RECIPE = torchq.recipes.int8(reduce_range=saturates(), recurrent=True)


def results(model: nn.Module, inputs: Any, calls: int = 1) -> list[Any]:
    """Return what calls one after the other give, from one state of the random numbers."""
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    kwargs = inputs if isinstance(inputs, dict) else {}
    actual: list[Any] = []
    model = copy.deepcopy(model)  # A forward may keep state.
    with ExitStack() as stack:
        for context in (torch.no_grad(), random_kept(), unfused_attention()):
            stack.enter_context(context)
        torch.manual_seed(0)
        for _ in range(calls):
            given = with_copies(() if kwargs else args)
            output = model(*given, **with_copies(kwargs))
            actual += list(leaves((output, given)))
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in actual]


def lost_by_conversion(
    plain: nn.Module, converted: nn.Module, inputs: Iterator[Any] | Any
) -> str:
    """Return in what a converted network, all quantizers off, differs from the float one."""
    quantizers = [
        m for net in (plain, converted) for m in net.modules() if is_quantizer(m)
    ]
    for number, x in enumerate(inputs):
        with switched_off(quantizers):
            problem = difference(
                *(results(net, x, calls=2) for net in (plain, converted))
            )
        if problem:
            return f"input {number}: {problem}"
    return ""


def lost_by_quantizers(plain: nn.Module, quantized: nn.Module, example: Any) -> str:
    """Return in what a calibrated network is far from the float one; "" where it is near."""
    expected = [x for x in results(plain, example) if isinstance(x, Tensor)]
    got = [x for x in results(quantized, example) if isinstance(x, Tensor)]
    least = min(map(decibels, got, expected), default=torch.inf)
    return "" if least >= LEAST_DB_OF_8_BITS else f"{least:.1f} dB of the float model"


def is_quantizer(module: Any) -> bool:
    return isinstance(module, torchq.TensorQuantizer)


def lost_on_an_engine(simulation: nn.Module, example: Any, other: Any) -> str:
    """Return in what a deployed network differs from its simulation, or why it is refused."""
    try:
        deployed = torchq.deploy(simulation, example, target="torch", progress=False)
    except ExportError as error:
        return str(error)
    got = [x for x in results(deployed, other) if isinstance(x, Tensor)]
    expected = [x for x in results(simulation, other) if isinstance(x, Tensor)]
    if len(got) != len(expected):
        return f"returns {len(got)} tensors, not {len(expected)}"
    least = min(map(decibels, got, expected), default=LEAST_DB)
    return "" if least >= LEAST_DB else f"{least:.1f} dB of the simulation"


def decibels(got: Tensor, wanted: Tensor) -> float:
    """Return the ratio of signal to error; infinite for equal tensors."""
    if got.shape != wanted.shape:
        return -torch.inf
    error = float((got.double() - wanted.double()).square().sum())
    signal = float(wanted.double().square().sum())
    return torch.inf if error == 0 else float(10 * torch.tensor(signal / error).log10())


def harm_of_correction(
    plain: nn.Module, quantized: Callable[[bool], nn.Module], batch: Any
) -> str:
    """Return how much worse the correction makes the outputs on the batch that it is fitted on."""
    # A float network may have quantizers of its author, which both versions are without in float.
    with switched_off([m for m in plain.modules() if is_quantizer(m)]):
        expected = [x for x in results(plain, batch) if isinstance(x, Tensor)]
    errors = []
    for correct in (True, False):
        got = [x for x in results(quantized(correct), batch) if isinstance(x, Tensor)]
        shares = [
            10 ** (-decibels(a, b) / 10) for a, b in zip(got, expected, strict=True)
        ]
        errors.append(sum(shares))
    # The sums of errors that are compared may be rounded.
    is_worse = errors[0] > errors[1] * (1 + 1e-6)
    return f"{errors[0]:.2e} of noise, {errors[1]:.2e} without" if is_worse else ""
