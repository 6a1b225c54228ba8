"""What an algorithm does to the outputs of the whole model, on batches that it did not learn from.

Errors of layers and blocks fall where weights are fitted to them, also where the fit is to the few
images at hand. So the model's outputs before and after are compared with those in float, and what
makes them worse is undone as a whole.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torchq.graph import Forward
from torchq.nn import switched_off
from torchq.utils import device_of, kept_batches, undone_on_error
from torchq.workflow import quantizers
from torchq.workflow.layer_changes import own_tensors
from torchq.workflow.runs import Comparison, NoiseSums, Runs, shortened

#: One of so many batches is not learned from, where there are as many.
_EIGHTH = 8


class Judge:
    """The outputs of a quantized model before it is changed, and in float.

    Attributes:
        learned: the batches to learn from.
        held_out: True if others judge.
        outputs: the comparison, after :meth:`trial`.
    """

    def __init__(
        self,
        where: str,
        model: nn.Module,
        batches: Iterable[Any],
        num_batches: int | None,
        forward: Forward | None,
        *,
        compares: bool,
    ) -> None:
        self.learned: Sequence[Any] = kept_batches(where, batches, num_batches)
        self.outputs = Comparison()
        self.held_out = compares and len(self.learned) >= _EIGHTH
        self._model = model
        self._compares = compares
        judging = max(1, len(self.learned) // _EIGHTH)
        self._runs = Runs(model, self.learned[-judging:], forward)
        if self.held_out:
            self.learned = self.learned[:-judging]

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Compare the outputs with and without what the ``with`` block changes; undo the worse."""
        if not self._compares:
            yield
            return
        with switched_off(quantizers(self._model).values()):
            exact = self._results()
        before = self._results()
        written = own_tensors(self._model.modules())
        # What ends the work early keeps what is finished, as the function's own warning says.
        keeping = undone_on_error(self._model, written=written, but=BaseException)
        with keeping as restore:
            yield
            sums = NoiseSums()
            for results in zip(exact, before, self._results(), strict=True):
                sums.add(*results)
            self.outputs = sums.comparison(None, device_of(self._model))
            if self.outputs.is_worse:
                restore()

    @property
    def line(self) -> str:
        """Say in one line what became of the outputs; "" where nothing was compared."""
        if not self.outputs.batches:
            return ""
        sentence = str(self.outputs)
        if self.held_out:
            sentence += " that no weight was fitted to"
        if self.outputs.is_worse:
            sentence += ", so the model stays as it was"
        return sentence

    def _results(self) -> list[list[Tensor]]:
        """Return a part of what the model gives for each of the batches that judge."""
        results: list[list[Tensor]] = []
        self._runs.again(
            lambda _, batch: results.append(shortened(self._runs.call(batch))), None
        )
        return results
