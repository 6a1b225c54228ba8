"""Switching the quantizers of a model off and on for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torchq.nn.tensor_quantizer import TensorQuantizer


@contextmanager
def quantizing_only(
    known: Iterable[TensorQuantizer], chosen: Iterable[TensorQuantizer] = ()
) -> Iterator[None]:
    """Let only the chosen ones of some quantizers quantize, and none observe.

    At the end all do what they did before. Without ``chosen`` it turns all of them off.
    """
    before = [(quantizer, quantizer.mode) for quantizer in known]
    chosen_ids = {id(quantizer) for quantizer in chosen}
    try:
        for quantizer, _ in before:
            quantizer.mode = "quantize" if id(quantizer) in chosen_ids else "off"
        yield
    finally:
        for quantizer, mode in before:
            quantizer.mode = mode
