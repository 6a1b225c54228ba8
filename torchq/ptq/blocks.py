"""The division of a model into blocks: modules that run once in a call, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq.errors import ConfigError
from torchq.utils import Pattern, check_pattern, matches, pattern_text

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Block:
    """A module that is treated as a whole; ``layers`` are those to treat, in running order."""

    name: str
    module: nn.Module
    layers: dict[str, Any]


@dataclass(frozen=True)
class CallCount:
    """By id of a module: the number of its calls in one run, and the place of the first one."""

    counts: dict[int, int]
    order: dict[int, int]


def find_blocks(
    model: nn.Module,
    layers: dict[str, Any],
    calls: CallCount,
    patterns: Pattern | Sequence[Pattern] | None = None,
) -> tuple[list[Block], dict[str, str]]:
    """Return the blocks of ``model`` in running order, and the layers that no block holds.

    A block is the largest module that runs once and is no chain. A chain is the model itself, a
    list of modules inside a chain, or a module around a list of which two children or more hold
    two layers each, such as the encoder around the blocks of a transformer. A layer outside all
    others is a block of its own. ``patterns`` name the blocks in place of the structure.
    """
    found: dict[str, nn.Module] = {}
    if patterns is None:
        _split(model, "", layers, calls, found, inside_chain=True)
    else:
        found = _chosen(model, layers, patterns)
        left = {n: m for n, m in layers.items() if not _owner(n, found)}
        found |= {n: m for n, m in left.items() if calls.counts.get(id(m)) == 1}
    blocks, skipped = [], {}
    for name, module in found.items():
        own = {n: m for n, m in layers.items() if n == name or n.startswith(f"{name}.") or not name}
        for path in [n for n, m in own.items() if calls.counts.get(id(m), 0) != 1]:
            skipped[path] = _why_not(calls.counts.get(id(own.pop(path)), 0))
        if own:
            ordered = sorted(own.items(), key=lambda item: calls.order[id(item[1])])
            blocks.append(Block(name, module, dict(ordered)))
    treated = {path for block in blocks for path in block.layers}
    for path in layers.keys() - treated - skipped.keys():
        skipped[path] = _why_not(calls.counts.get(id(layers[path]), 0))
    blocks.sort(key=lambda block: calls.order[id(next(iter(block.layers.values())))])
    return blocks, skipped


def _why_not(count: int) -> str:
    return "no batch reached it" if count == 0 else "it or a module around it runs several times"


def _owner(name: str, blocks: Iterable[str]) -> str | None:
    return next((b for b in blocks if name == b or name.startswith(f"{b}.")), None)


def _chosen(
    model: nn.Module, layers: dict[str, Any], patterns: Pattern | Sequence[Pattern]
) -> dict[str, nn.Module]:
    """Return the outermost modules with layers that the patterns select."""
    single = isinstance(patterns, (str, type)) or callable(patterns)
    listed: Sequence[Pattern] = [patterns] if single else list(patterns)  # type: ignore
    found: dict[str, nn.Module] = {}
    for pattern in listed:
        check_pattern(pattern)
        hits = {
            name: module
            for name, module in model.named_modules()
            if name and matches(pattern, [name], module) and _count(name, layers)
        }
        if not hits:
            raise ConfigError(
                f"block: got {pattern_text(pattern)}, which matches no module with layers to "
                f"treat; expected a pattern such as {next(iter(layers), 'layer1.*')!r}"
            )
        found |= hits
    return {name: m for name, m in found.items() if not _owner(name, found.keys() - {name})}


def _count(name: str, layers: Iterable[str]) -> int:
    return sum(path == name or path.startswith(f"{name}.") or not name for path in layers)


def _split(
    module: nn.Module,
    name: str,
    layers: dict[str, Any],
    calls: CallCount,
    found: dict[str, nn.Module],
    *,
    inside_chain: bool,
) -> None:
    """Add the blocks at and below ``module`` to ``found``."""
    if not _count(name, layers):
        return
    runs_once = calls.counts.get(id(module)) == 1
    is_chain = not name or (inside_chain and isinstance(module, _LISTS))
    is_chain = is_chain or _holds_list_of_blocks(module, name, layers)
    if name in layers or (runs_once and not is_chain):
        if runs_once:
            found[name] = module
        return
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        _split(child, path, layers, calls, found, inside_chain=is_chain)


def _holds_list_of_blocks(module: nn.Module, name: str, layers: dict[str, Any]) -> bool:
    """Return True if a list below ``module`` has two children or more with two layers each."""
    prefix = f"{name}." if name else ""
    for path, part in module.named_modules():
        if isinstance(part, _LISTS):
            inner = f"{prefix}{path}." if path else prefix
            sizes = [_count(inner + child, layers) for child, _ in part.named_children()]
            if sum(size > 1 for size in sizes) > 1:
                return True
    return False
