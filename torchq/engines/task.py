"""One deployment: what is asked for, and what every engine that is tried needs of it, once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchq.engines.export import OpenLengths, export_graph, lengths_to_try, probes
from torchq.engines.interface.structure import Structure, flatten
from torchq.engines.module import GraphInterface
from torchq.errors import ExportError
from torchq.graph import call_model
from torchq.lowering.api import float_copy
from torchq.lowering.check import ReferenceCheck

__all__ = ["Task"]


class Task:
    """A calibrated model, and how it will be called.

    Args:
        model: from :func:`torchq.lowering.api.simulated_copy`; nobody changes it.
        example: arguments for one call, see :func:`torchq.graph.call_model`; None where the engine
            needs none.
        batch_sizes: which other batch sizes than that of the example will be common.
        progress: show a bar for what takes longer than a second.

    Attributes:
        model: see above.
        example: see above.
        batch_sizes: see above.
        progress: see above.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        batch_sizes: Sequence[int] = (),
        progress: bool = False,
    ) -> None:
        self.progress = progress
        self.model, self.example, self.batch_sizes = model, example, tuple(batch_sizes)
        self._graphs: dict[Any, tuple[Tensor, GraphInterface] | ExportError] = {}
        self._probes: dict[int, list[ReferenceCheck]] = {}

    @cached_property
    def check(self) -> ReferenceCheck:
        """The results of the simulation for the example."""
        return ReferenceCheck(self.model, self.example)

    @cached_property
    def float_model(self) -> nn.Module:
        """The model as it was before it was quantized."""
        return float_copy(self.model)

    @cached_property
    def lengths(self) -> tuple[OpenLengths, ...]:
        """Sets of lengths that could stay open, the largest first."""
        return lengths_to_try(self.model, self.example)

    def checks_of_other_lengths(self, lengths: OpenLengths) -> list[ReferenceCheck]:
        """Return the results of the simulation for inputs of other lengths."""
        key = self.lengths.index(lengths)
        if key not in self._probes:
            examples = probes(self.model, self.example, lengths)
            self._probes[key] = [ReferenceCheck(self.model, example) for example in examples]
        return self._probes[key]

    def structures_of_other_lengths(self, lengths: OpenLengths) -> list[Structure]:
        """Return the structure of the model's results for inputs of other lengths."""
        with torch.no_grad():
            examples = probes(self.model, self.example, lengths)
            return [flatten(call_model(self.model, example))[1] for example in examples]

    def graph(
        self, target: str | None, dynamo: bool, lengths: OpenLengths
    ) -> tuple[Tensor, GraphInterface]:
        """Return the model as an ONNX file; see :func:`export_graph`.

        Args:
            target: of the file; None for the float model.
            dynamo: which exporter of torch.
            lengths: one of :attr:`lengths`.

        Raises:
            ExportError: the model cannot be exported like this.
        """
        key = (target, dynamo, self.lengths.index(lengths))
        if key not in self._graphs:
            model = self.float_model if target is None else self.model
            try:
                self._graphs[key] = export_graph(
                    model, self.example, target=target, dynamo=dynamo, lengths=lengths
                )
            except ExportError as error:
                self._graphs[key] = error
        found = self._graphs[key]
        if isinstance(found, ExportError):
            raise found
        return found
