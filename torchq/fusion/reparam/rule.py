"""Known re-parameterisable blocks: names say where the linear part is and which attribute to write; kernels come from the engines.

A rule never restates a block's arithmetic. Its linear part is the block's own ``forward`` with the modules that follow it (activation,
squeeze-excite) bypassed; :func:`torchq.fusion.linear_map.solve.linear_map` turns that into one layer, and the whole block is compared before and
after on random inputs, in float64, on a copy.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.fusion.channel_ranges import spread_of
from torchq.fusion.linear_map.solve import TOLERANCE, Function, linear_map, relative_error
from torchq.fusion.linear_map.symbolic import NotAffine
from torchq.fusion.modules import block_obstacle, is_layer, is_norm
from torchq.fusion.reparam.merged_layer import MergedLayer, geometry_of, rank_of
from torchq.fusion.report import Fusion, Refusal
from torchq.utils import Registry, set_submodule

__all__ = [
    "BLOCKS",
    "BlockEdit",
    "BlockRule",
    "Merge",
    "find_blocks",
    "plan_blocks",
    "register_block",
]

#: ``merge(function, main)`` returns the one layer that ``function`` is; ``main`` is the layer whose geometry it should take.
Merge = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class BlockRule:
    """How one family of blocks is merged.

    Attributes:
        name: of the family, for the report.
        has: attributes that the training form has (they may be None).
        branches: attributes, as globs, that are removed; the first layer found in them gives rank, channels and geometry.
        writes: the attribute that takes the merged layer; None puts the layer in the place of the whole block. Where it holds a
            layer of the right geometry already, that object is kept and gets new parameters.
        bypass: attributes applied after the linear part, replaced by Identity while it is taken.
        lacks: attributes that must be missing or None (the deployed form has them).
        flags: attributes set afterwards, where the block has them.
        when: a further condition.
        linear: the linear part as a function of the block and its input, where ``forward`` cannot be used.
        finish: a last touch on the merged block.
        quantized: the block holds quantizers by design, and knows how to keep them.
        loose: the names are common ones, so a block that turns out not to be linear is no news for the report.
    """

    name: str
    has: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    writes: str | None = None
    bypass: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)
    when: Callable[[Any], bool] | None = None
    linear: Callable[[Any, Tensor], Tensor] | None = None
    finish: Callable[[Any], None] | None = None
    quantized: bool = False
    loose: bool = False

    def matches(self, block: Any) -> bool:
        """Whether ``block`` is this family's training form."""
        present = all(hasattr(block, name) for name in self.has)
        return (
            present
            and all(getattr(block, name, None) is None for name in self.lacks)
            and (self.when is None or self.when(block))
        )

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """Bring ``block`` into its deployed form; returns what takes its place, or None where it stays."""
        linear = self.linear
        with bypassed(block, self.bypass):
            layer = merge(
                block.forward if linear is None else lambda x: linear(block, x),
                main_layer(block, self.branches),
            )
        if self.writes is None:
            return layer.make()
        remove(
            block, [name for name in attributes_like(block, self.branches) if name != self.writes]
        )
        write(block, self.writes, layer)
        for name, value in self.flags.items():
            if hasattr(block, name):
                setattr(block, name, value)
        if self.finish is not None:
            self.finish(block)
        return None


#: Rules by family; a block is tried against later entries first, so a user's rule goes before the built-in ones.
BLOCKS: Registry[str, BlockRule] = Registry("block family")

T = TypeVar("T")


def register_block(name: str, **fields: Any) -> Callable[[T], T]:
    """Teach :func:`torchq.fuse_` a block: decorate its class, or a predicate ``(module) -> bool``.

    Args:
        name: of the family.
        **fields: those of :class:`BlockRule`; usually ``branches``, ``writes`` and ``bypass``.

    Example:
        >>> @register_block("two", branches=("wide", "narrow"), writes="merged", bypass=("act",))  # doctest: +SKIP
        ... class Two(torch.nn.Module):
        ...     def forward(self, x):
        ...         if hasattr(self, "merged"):
        ...             return self.act(self.merged(x))
        ...         return self.act(self.wide(x) + self.narrow(x))
    """

    def decorator(target: T) -> T:
        if isinstance(target, type):
            cls = target
            fields.setdefault("has", tuple(b for b in fields.get("branches", ()) if "*" not in b))
            BLOCKS.add(
                name, BlockRule(name=name, when=lambda block: isinstance(block, cls), **fields)
            )
        elif callable(target):
            BLOCKS.add(name, BlockRule(name=name, when=target, **fields))
        else:
            raise ConfigError(
                f"register_block({name!r}): got {target!r}; expected a class or a predicate"
            )
        return target

    return decorator


# -- helpers for rules -----------------------------------------------------------------------------------------------------------


@contextmanager
def bypassed(block: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Replace child modules by Identity, and put them back."""
    kept = {
        name: child for name in names if isinstance(child := getattr(block, name, None), nn.Module)
    }
    try:
        for name in kept:
            setattr(block, name, nn.Identity())
        yield
    finally:
        for name, child in kept.items():
            setattr(block, name, child)


def attributes_like(block: nn.Module, globs: tuple[str, ...]) -> list[str]:
    """Attributes of ``block``, own or registered, that match; in the order of ``globs``."""
    own = [
        *vars(block),
        *(n for n, _ in block.named_children()),
        *(n for n, _ in block.named_parameters(recurse=False)),
    ]
    own += [name for name, _ in block.named_buffers(recurse=False)]
    own += [
        name for name in globs if hasattr(block, name) and "*" not in name
    ]  # registered as None, or a repeated child
    return [
        name for glob in globs for name in dict.fromkeys(own) if fnmatch.fnmatchcase(name, glob)
    ]


def main_layer(block: nn.Module, globs: tuple[str, ...]) -> nn.Module:
    """The first layer, or else the first BatchNorm, among the attributes that match."""
    roots = [
        child
        for name in attributes_like(block, globs)
        if isinstance(child := getattr(block, name), nn.Module)
    ]
    inside = [module for root in roots for module in root.modules()]
    found = [m for m in inside if is_layer(m)] or [m for m in inside if is_norm(m)]
    if not found:
        raise NotAffine("no layer in its branches")
    return found[0]


def remove(block: nn.Module, names: list[str]) -> None:
    """Delete attributes."""
    for name in names:
        if hasattr(block, name):
            delattr(block, name)


def write(block: Any, name: str, layer: MergedLayer) -> None:
    """Put the merged layer at ``name``: into the layer there where its geometry fits, else as a new one."""
    old = getattr(block, name, None)
    if is_layer(old) and geometry_of(old) == layer.geometry:
        layer.put_into(old)
        return
    if name in vars(block):  # a plain None in the way of a child
        delattr(block, name)
    setattr(block, name, layer.make())


# -- planning --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockEdit:
    """A planned merge of one block, applicable to the model and to copies of it."""

    path: str
    rule: BlockRule
    layers: tuple[MergedLayer, ...]
    fusion: Fusion

    def apply(self, model: nn.Module) -> None:
        """Convert the block at the path, wherever else it is registered too."""
        block = model.get_submodule(self.path)
        names = [
            name for name, module in model.named_modules(remove_duplicate=False) if module is block
        ]
        replay = iter(self.layers)
        replacement = self.rule.convert(block, lambda *args, **kwargs: next(replay).like(block))
        if replacement is not None:
            for name in names:
                set_submodule(model, name, replacement)


def find_blocks(model: nn.Module) -> list[tuple[str, BlockRule]]:
    """Paths and rules of the blocks that still have their branches, by name alone; nothing is computed."""
    found: list[tuple[str, BlockRule]] = []
    for path, block in model.named_modules():
        if not any(path.startswith(outer + ".") for outer, _ in found):
            rule = next(
                (
                    BLOCKS[name]
                    for name in reversed(list(BLOCKS))
                    if BLOCKS[name].matches(block) and not BLOCKS[name].loose
                ),
                None,
            )
            found += [(path, rule)] if rule is not None else []
    return found


def plan_blocks(model: nn.Module) -> list[BlockEdit | Refusal]:
    """Plan every known block of ``model``, outermost first; ``model`` is not changed."""
    results: list[BlockEdit | Refusal] = []
    inside: tuple[str, ...] = ()
    for path, block in model.named_modules():
        if inside and path.startswith(inside):
            continue
        result = _plan_block(path, block)
        if result is not None:
            results.append(result)
            inside += (path + "." if path else "",)
            if not path:
                break
    return results


def _plan_block(path: str, block: nn.Module) -> BlockEdit | Refusal | None:
    refusal = None
    for name in reversed(list(BLOCKS)):
        rule = BLOCKS[name]
        if not rule.matches(block) or (rule.writes is None and not path):
            continue
        if reason := block_obstacle(block, quantized=rule.quantized):
            return Refusal(path, f"is a {name} block; {reason}")
        try:
            return _convert_copy(path, block, rule)
        except NotAffine as reason:
            if not rule.loose:
                refusal = Refusal(path, f"looks like a {name} block; {reason}")
    return refusal


def _convert_copy(path: str, block: nn.Module, rule: BlockRule) -> BlockEdit:
    probe = copy.deepcopy(block).cpu().double()
    reference = copy.deepcopy(probe)
    layers: list[MergedLayer] = []
    errors: list[float] = []

    def merge(
        function: Function, main: Any = None, *, channels: int | None = None, rank: int = 2
    ) -> MergedLayer:
        hint = geometry_of(main) if is_layer(main) else None
        width = (
            channels
            if channels is not None
            else hint.channels
            if hint is not None
            else main.running_mean.numel()
        )
        geometry, value, error = linear_map(
            function, width, rank if main is None else rank_of(main), hint
        )
        errors.append(error)
        layers.append(MergedLayer.of(geometry, value, block))
        return layers[-1].like(probe)

    replacement = rule.convert(probe, merge)
    errors.append(_block_error(reference, replacement or probe, layers[0]))
    if not errors[-1] <= TOLERANCE:
        raise NotAffine(
            f"merging would be off by {errors[-1]:.1e} (relative, float64); expected at most {TOLERANCE:.0e}"
        )
    parts = tuple(
        f"{path}.{name}".lstrip(".")
        for name in attributes_like(block, rule.branches)
        if getattr(block, name) is not None
    )
    name = path if rule.writes is None else f"{path}.{rule.writes}".lstrip(".")
    before = [spread_of(m, m.weight) for m in block.modules() if is_layer(m)]
    after = max(spread_of(nn.Identity(), layer.value.kernel) for layer in layers)
    fusion = Fusion(
        name, rule.name, parts, max(errors), "names", None, max(before, default=None), after
    )
    return BlockEdit(path, rule, tuple(layers), fusion)


def _block_error(before: nn.Module, after: nn.Module, layer: MergedLayer) -> float:
    """Compare whole blocks, activation included; 0 where the block needs more than one tensor (then its layers were compared)."""
    generator, error = torch.Generator().manual_seed(0), 0.0
    geometry = layer.geometry
    for extra in (2, 5):
        x = torch.randn(
            2,
            geometry.channels,
            *(w + extra + axis for axis, w in enumerate(geometry.window)),
            dtype=torch.float64,
            generator=generator,
        )
        with torch.no_grad():
            try:
                want = before.forward(x)
            except Exception:  # takes a list of feature maps, or further arguments
                return error
            if not isinstance(want, Tensor):
                return error
            error = max(error, relative_error(after.forward(x), want))
    return error
