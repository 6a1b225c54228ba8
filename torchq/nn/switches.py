"""Switching the quantizers of a model off and on for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torchq.nn.tensor_quantizer import TensorQuantizer


@contextmanager
def switched_off(
    quantizers: Iterable[TensorQuantizer], *, but: Iterable[TensorQuantizer] = ()
) -> Iterator[None]:
    """Turn quantizers off inside a ``with`` block; none of them observes.

    At the end all do what they did before.

    Args:
        quantizers: those that are switched; others stay as they are.
        but: those among them that quantize in the block, whatever they did before.
    """
    before = [(quantizer, quantizer.mode) for quantizer in quantizers]
    ids_on = {id(quantizer) for quantizer in but}
    try:
        for quantizer, _ in before:
            quantizer.mode = "quantize" if id(quantizer) in ids_on else "off"
        yield
    finally:
        for quantizer, mode in before:
            quantizer.mode = mode


@contextmanager
def switched_on(quantizers: Iterable[TensorQuantizer]) -> Iterator[None]:
    """Let quantizers quantize inside a ``with`` block; none of them observes.

    At the end all do what they did before.
    """
    all_of_them = list(quantizers)
    with switched_off(all_of_them, but=all_of_them):
        yield
