"""What ``fuse_`` did to a model, kept with the model as data, and replayed on an unfused one.

The entries lie with the modules that they concern, so a part of a fused model has the record of
that part: each entry is an attribute of the deepest module that holds all the modules it names.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from torchq.fusion import schema
from torchq.fusion.batchnorm.fold import fold_from_record
from torchq.fusion.reparam.blocks import block_from_record
from torchq.utils import undone_on_error

__all__ = ["apply_fusion_record_", "fusion_record", "recording"]

Entry = Mapping[str, Any]


class _Change(Protocol):
    """A change of a model."""

    def apply(self, model: nn.Module) -> None:
        """Carry the change out."""
        ...


#: Kind of an entry -> function that checks it against a model and returns the change.
_KINDS: dict[str, Callable[[nn.Module, Entry], _Change]] = {
    "batchnorm": fold_from_record,
    "block": block_from_record,
}

#: The attribute that holds ``((order, entry with paths below the module), ...)``.
_ATTRIBUTE = "_torchq_fusions"


def fusion_record(model: nn.Module) -> list[dict[str, Any]]:
    """Return what ``fuse_`` did to ``model`` and its parts, as JSON data, in order.

    The record survives ``copy.deepcopy``, pickling, quantization and ``restore_``. It is not part
    of the state dict.

    Args:
        model: any module; left unchanged.

    Returns:
        One entry for each fusion: ``kind``, the paths of the modules, and the class and
        constructor arguments of new layers. Empty if nothing was fused.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
        >>> report = torchq.fuse_(model)
        >>> fusion_record(model)
        [{'kind': 'batchnorm', 'norms': ['1'], 'layers': ['0'], 'constant_pad': False}]
    """
    return [entry for _, entry in _ordered(model)]


def apply_fusion_record_(model: nn.Module, record: Sequence[Entry]) -> None:
    """Bring an unfused model into the structure of a fused one, in place.

    Afterwards the state dict of the fused model can be loaded. Until then new parameters are
    zero, and a changed layer keeps its own. Entries that ``model`` has in its own record already
    are skipped. The record may come from a file: nothing in it is executed, and every name and
    size is checked. A call that fails leaves the model as it was.

    Args:
        model: of the class that was fused.
        record: what :func:`fusion_record` returned.

    Raises:
        ConfigError: the record is damaged, or names a family that is not registered.
        FuseError: the model is not the one that was fused.

    Example:
        >>> from torch import nn
        >>> fused, fresh = (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)) for _ in "ab")
        >>> report = torchq.fuse_(fused.eval())
        >>> apply_fusion_record_(fresh, fusion_record(fused))
        >>> fresh.load_state_dict(fused.state_dict())
        <All keys matched successfully>
    """
    if not isinstance(record, (list, tuple)):
        raise schema.damaged(record, None, "a list of entries")
    for entry in record:
        if schema.text(entry, "kind") not in _KINDS:
            raise schema.damaged(entry, "kind", f"one of {', '.join(sorted(_KINDS))}")
    known = {_canonical(entry) for entry in fusion_record(model)}
    entries = [dict(entry) for entry in record if _canonical(entry) not in known]
    with torch.inference_mode(False), undone_on_error(model), recording(model, entries):
        for entry in entries:
            _KINDS[entry["kind"]](model, entry).apply(model)


def _canonical(entry: Entry) -> str:
    try:
        return json.dumps(entry, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise schema.damaged(entry, None, "JSON data") from None


@contextmanager
def recording(model: nn.Module, entries: Sequence[Entry]) -> Iterator[None]:
    """Add ``entries`` to the record of ``model`` once the body has carried them out.

    Args:
        model: the body changes it.
        entries: what the body does, with paths in ``model``.
    """
    old = _ordered(model)
    before = dict(model.named_modules(remove_duplicate=False))
    yield
    start = max((order for order, _ in old), default=-1) + 1
    new = [copy.deepcopy(dict(entry)) for entry in entries]
    _store(model, before, [*old, *enumerate(new, start)])


def _ordered(model: nn.Module) -> list[tuple[int, dict[str, Any]]]:
    """Return order and entry of everything recorded below ``model``, with paths in ``model``."""
    found = [
        (order, _with_prefix(entry, path))
        for path, module in model.named_modules()
        for order, entry in vars(module).get(_ATTRIBUTE, ())
    ]
    return sorted(found, key=lambda item: item[0])


def _store(
    model: nn.Module,
    before: Mapping[str, nn.Module],
    entries: Sequence[tuple[int, dict[str, Any]]],
) -> None:
    """Write each entry to the deepest module that holds what it names and was not replaced."""
    modules = dict(model.named_modules(remove_duplicate=False))
    held: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for order, entry in entries:
        path = _common_parent(_paths(entry))
        while path and (path not in modules or modules[path] is not before.get(path)):
            path = path.rpartition(".")[0]
        held.setdefault(path, []).append((order, _without_prefix(entry, path)))
    for module in modules.values():
        if _ATTRIBUTE in vars(module):
            delattr(module, _ATTRIBUTE)
    for path, items in held.items():
        setattr(modules[path], _ATTRIBUTE, tuple(items))


def _paths(entry: Entry) -> list[str]:
    if "path" in entry:
        return [entry["path"]]
    return [*entry["norms"], *entry["layers"]]


def _with_paths(entry: Entry, change: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of ``entry`` with every path changed."""
    new = copy.deepcopy(dict(entry))
    if "path" in new:
        new["path"] = change(new["path"])
    else:
        for key in ("norms", "layers"):
            new[key] = [change(path) for path in new[key]]
    return new


def _with_prefix(entry: Entry, prefix: str) -> dict[str, Any]:
    return _with_paths(entry, lambda path: f"{prefix}.{path}".strip("."))


def _without_prefix(entry: Entry, prefix: str) -> dict[str, Any]:
    return _with_paths(entry, lambda path: path[len(prefix) :].lstrip("."))


def _common_parent(paths: Sequence[str]) -> str:
    """Return the path of the deepest module that holds the modules at all ``paths``."""
    parents = [path.split(".")[:-1] for path in paths]
    common: list[str] = []
    for names in zip(*parents, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
