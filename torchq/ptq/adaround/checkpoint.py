"""The file of finished blocks, from which an interrupted call goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from torchq.errors import ConfigError
from torchq.utils import replacing

__all__ = ["Checkpoint"]


class _State(Protocol):
    def tensors(self) -> list[Tensor]: ...

    def write(self, tensors: list[Tensor]) -> None: ...


class Checkpoint:
    """The tensors and the result of each finished block, in a file that is replaced as a whole.

    Args:
        path: the file; None keeps nothing.
        settings: of the call; a file of other settings is refused.
    """

    def __init__(self, path: str | Path | None, settings: dict[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._data: dict[str, Any] = {"settings": settings, "blocks": {}}
        if self._path is None or not self._path.exists():
            return
        try:
            found = torch.load(self._path, weights_only=True)
            known = found["settings"], found["blocks"].items()
        except Exception as error:  # a damaged file may fail in any way
            raise ConfigError(
                f"adaround_: checkpoint {self._path}: not readable ({type(error).__name__}); "
                "expected a file of this function. Delete it to start again"
            ) from error
        if known[0] != settings:
            raise ConfigError(
                f"adaround_: checkpoint {self._path}: got a file for {known[0]}; expected "
                f"{settings}. Delete it, or repeat the call that wrote it"
            )
        self._data = found

    def load(self, name: str, state: _State) -> tuple[float, float, float] | None:
        """Write what the file has of a block into it; return its result, or None.

        Raises:
            ConfigError: the tensors have other shapes.
        """
        found = self._data["blocks"].get(name)
        if found is None:
            return None
        shapes = [tuple(t.shape) for t in found["tensors"]]
        # Ranges may have another shape than now, as blocks of inputs have after gptq_.
        if len(shapes) != len(state.tensors()):
            raise ConfigError(
                f"adaround_: checkpoint {self._path}: {name} has {len(shapes)} tensors; expected "
                f"{len(state.tensors())}. The file is of another model; delete it"
            )
        state.write(found["tensors"])
        before, after, undecided = found["result"]
        return before, after, undecided

    def save(
        self, name: str, state: _State, result: tuple[float, float, float]
    ) -> tuple[float, float, float]:
        """Add a finished block to the file; return ``result``."""
        if self._path is not None:
            tensors = [t.detach().clone() for t in state.tensors()]
            self._data["blocks"][name] = {"tensors": tensors, "result": list(result)}
            with replacing(self._path) as (path,):
                torch.save(self._data, path)
        return result
