"""Weights that lie in files, and in memory only while their block runs or changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.ptq.blockwise.forwards import replaced_forward
from torchq.ptq.blockwise.free_memory import release_free_memory
from torchq.utils import Pattern, check_pattern, matches, pattern_text, replacing

__all__ = ["LazyWeights"]

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass
class _Part:
    """One module whose parameters lie in a file.

    Attributes:
        module: it.
        names: path in the model -> path in the module, of each parameter.
        path: the file, once it is written.
        users: how many runs and changes need the parameters now.
        is_written: the file holds the values.
        is_released: the module has no values at the moment.
    """

    module: nn.Module
    names: dict[str, str]
    path: Path
    users: int = 0
    is_written: bool = False
    is_released: bool = False


class LazyWeights:
    """Keeps the parameters of blocks of a model in files; a context manager.

    Inside it a block has its parameters only while it runs, or while an algorithm that was given
    this object (``RunOptions(weights=...)``) changes it. So :func:`gptq_` needs the memory of one
    block and of a few matrices of one layer, which are in float32 if it has many inputs. At any
    other time the parameters are NaN, and cannot be written to. Afterwards they are mapped from the
    files, which the system reads as they are needed; so keep the folder.

    Ranges of activations are the business of the caller: :func:`torchq.calibrate` reads every
    weight. Weights alone and inputs with dynamic ranges need no calibration.

    Args:
        model: float or quantized. Parameters on the meta device become real if ``source`` is given.
        folder: where the parameters of each block are kept, in one file for each; it must exist.
        block: patterns of the modules that are blocks; None takes the elements of the outermost
            lists of modules.
        source: from the path of a parameter to its value, such as the ``get_tensor`` of an open
            file of safetensors; None takes the values that the model has.

    Raises:
        ConfigError: there is no block, or a parameter is on the meta device and has no source.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> _ = torchq.quantize_(model, torchq.recipes.integer(4, None))
        >>> batches = [torch.rand(64, 8)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with torchq.ptq.LazyWeights(model, folder) as weights:
        ...         run = torchq.ptq.RunOptions(weights=weights)
        ...         layers = torchq.ptq.gptq_(model, batches, run=run, progress=False).layers
        >>> list(layers)
        ['0', '1']
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        block: Pattern | Sequence[Pattern] | None = None,
        source: Callable[[str], Tensor] | None = None,
    ) -> None:
        self._model, self._source, self._stack = model, source, ExitStack()
        found = _elements(model) if block is None else _chosen(model, block)
        if not found:
            raise ConfigError(
                "LazyWeights: got a model without a list of modules; expected blocks. Name them "
                "with block="
            )
        owners: dict[int, set[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), set()).add(name)
        self._parts = [
            _Part(module, _own_names(name, module, owners), Path(folder) / f"block{number}.pt")
            for number, (name, module) in enumerate(found.items())
        ]

    def __enter__(self) -> LazyWeights:
        try:
            self._release_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _release_all(self) -> None:
        inside = {name for part in self._parts for name in part.names}
        for name, parameter in list(self._model.named_parameters()):
            if name not in inside and parameter.is_meta:
                _replace(self._model, name, self._read(name))
        for part in self._parts:
            if self._source is None:
                self._write(part)
            self._release(part)
            forward = partial(self._forward, part, part.module.forward)
            self._stack.enter_context(replaced_forward(part.module, forward))

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        for part in self._parts:
            if part.is_released:
                self._load(part)
                if not part.is_written:
                    self._write(part)
                    self._load(part)

    @contextmanager
    def changing(self, module: nn.Module) -> Iterator[None]:
        """Keep the parameters of a module in memory, and write them to their files at the end.

        Args:
            module: a module of the model; every block in it, and one around it, is loaded.
        """
        inside = set(module.modules())
        parts = [
            part
            for part in self._parts
            if part.module in inside or module in set(part.module.modules())
        ]
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(self._loaded(part))
            try:
                yield
            finally:
                for part in parts:
                    self._write(part)

    def _forward(self, part: _Part, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with self._loaded(part):
            return forward(*args, **kwargs)

    @contextmanager
    def _loaded(self, part: _Part) -> Iterator[None]:
        if not part.users:
            self._load(part)
        part.users += 1
        try:
            yield
        finally:
            part.users -= 1
            if not part.users:
                self._release(part)

    def _release(self, part: _Part) -> None:
        """Let the parameters of a block have their shapes, but no memory."""
        for name in part.names:
            parameter = self._model.get_parameter(name)
            device = "cpu" if parameter.is_meta else parameter.device
            value = torch.nan if parameter.is_floating_point() else 0
            nothing = torch.full((), value, dtype=parameter.dtype, device=device)
            _replace(self._model, name, nothing.expand(parameter.shape))
        part.is_released = True
        release_free_memory()

    def _load(self, part: _Part) -> None:
        """Give a block its parameters."""
        if part.is_written:
            values = torch.load(part.path, map_location="cpu", mmap=True, weights_only=True)
        else:
            values = {own: self._read(name) for name, own in part.names.items()}
        for own in part.names.values():
            parameter = part.module.get_parameter(own)
            parameter.data = values[own].to(parameter.device, parameter.dtype)
        part.is_released = False

    def _write(self, part: _Part) -> None:
        """Write the parameters of a block to its file."""
        values = {own: part.module.get_parameter(own).detach() for own in part.names.values()}
        if any(value.is_meta for value in values.values()):
            raise ConfigError(
                f"LazyWeights: {next(iter(part.names))} is on the meta device; expected a source "
                "of its value. Pass source="
            )
        with replacing(part.path) as (path,):
            torch.save(values, path)
        part.is_written = True

    def _read(self, name: str) -> Tensor:
        """Return the value of a parameter from the source."""
        if self._source is None:
            raise ConfigError(
                f"LazyWeights: {name} is on the meta device; expected a source of its value. Pass "
                "source="
            )
        return self._source(name)


def _elements(model: nn.Module) -> dict[str, nn.Module]:
    """Return the elements with parameters of the outermost lists of modules, by path."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, _LISTS) and not _is_inside(name, found):
            prefix = f"{name}." if name else ""
            children = {f"{prefix}{child}": m for child, m in module.named_children()}
            found |= {path: m for path, m in children.items() if any(True for _ in m.parameters())}
    return found


def _chosen(model: nn.Module, patterns: Pattern | Sequence[Pattern]) -> dict[str, nn.Module]:
    """Return the outermost modules that the patterns select, by path."""
    is_single = isinstance(patterns, (str, type)) or callable(patterns)
    listed: Any = [patterns] if is_single else patterns
    found: dict[str, nn.Module] = {}
    for pattern in listed:
        check_pattern(pattern)
        hits = {n: m for n, m in model.named_modules() if n and matches(pattern, [n], m)}
        if not hits:
            raise ConfigError(f"LazyWeights: got {pattern_text(pattern)}, which matches no module")
        found |= hits
    return {n: m for n, m in found.items() if not _is_inside(n, found.keys() - {n})}


def _is_inside(name: str, others: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _own_names(name: str, module: nn.Module, owners: dict[int, set[str]]) -> dict[str, str]:
    """Return the parameters that a block shares with nothing outside it."""
    prefix = f"{name}."
    return {
        f"{prefix}{own}": own
        for own, parameter in module.named_parameters()
        if all(owner.startswith(prefix) for owner in owners[id(parameter)])
    }


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    """Give a parameter another value; one on the meta device becomes another object."""
    parameter = model.get_parameter(name)
    if not parameter.is_meta:
        parameter.data = value
        return
    path, _, own = name.rpartition(".")
    real = nn.Parameter(value.to(dtype=parameter.dtype), requires_grad=parameter.requires_grad)
    setattr(model.get_submodule(path), own, real)
