"""What fusion knows of a family of blocks: where the linear part is, and which attribute to write.

A rule never restates a block's arithmetic. The linear part of a block is its own ``forward`` with
the modules behind it (activation, squeeze-excite) bypassed.
:func:`torchq.fusion.linear_map.solve.linear_map` turns that into one layer.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.fusion.linear_map.symbolic import NotAffine
from torchq.fusion.modules import is_layer, is_norm
from torchq.fusion.reparam.merged_layer import MergedLayer, geometry_of
from torchq.utils import Registry

__all__ = [
    "BLOCKS",
    "BlockRule",
    "Merge",
    "attributes_like",
    "main_layer",
    "register_block",
    "remove",
    "rule_of",
]

#: ``merge(function, main)`` returns the one layer that ``function`` is; ``main`` is the layer
#: whose geometry the result takes where that is exact.
Merge = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class BlockRule:
    """How one family of blocks is merged.

    Attributes:
        name: the name of the family, for the report and the record.
        has: attributes that the training form has (they may be None).
        branches: attributes, as globs, that are removed; the first layer found in them gives
            spatial dimensions, channels and geometry.
        writes: the attribute that receives the merged layer; with None it replaces the whole
            block, in front of what ``bypass`` names. A layer of the right geometry that is there
            already gets new parameters and stays the same object.
        bypass: attributes applied after the linear part; an Identity replaces them while the
            linear part is read.
        lacks: attributes that must be missing or None (the deployed form has them).
        flags: attributes set afterwards, where the block has them.
        when: a further condition.
        linear: the linear part as a function of the block and its input, where ``forward``
            cannot be used.
        finish: a last change of the merged block.
        loose: the names are common ones: a block that turns out not to be linear is not worth a
            line in the report.
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
    loose: bool = False

    def matches(self, block: Any) -> bool:
        """Return True if ``block`` is this family's training form."""
        if not all(hasattr(block, name) for name in self.has):
            return False
        if any(getattr(block, name, None) is not None for name in self.lacks):
            return False
        return self.when is None or self.when(block)

    def convert(self, block: Any, merge: Merge) -> Any:
        """Bring ``block`` into its deployed form, in place.

        Args:
            block: a block for which :meth:`matches` is true.
            merge: see :data:`Merge`.

        Returns:
            What replaces the block, or None where the block stays.
        """
        main = main_layer(block, self.branches)
        linear = self.linear
        with _bypassed(block, self.bypass):
            if linear is None:
                layer = merge(block.forward, main)
            else:
                layer = merge(lambda x: linear(block, x), main)
        if self.writes is None:
            after = [getattr(block, name, None) for name in self.bypass]
            behind = [module for module in after if isinstance(module, nn.Module)]
            return nn.Sequential(layer.make(), *behind) if behind else layer.make()
        names = attributes_like(block, self.branches)
        remove(block, [name for name in names if name != self.writes])
        _write(block, self.writes, layer)
        for name, value in self.flags.items():
            if hasattr(block, name):
                setattr(block, name, value)
        if self.finish is not None:
            self.finish(block)
        return None


#: Rules by family. A block is tried against later entries first, so a user's rule precedes the
#: built-in ones, and special families precede the general ones.
BLOCKS: Registry[str, BlockRule] = Registry("block family")

T = TypeVar("T")


def register_block(name: str, **fields: Any) -> Callable[[T], T]:
    """Teach :func:`torchq.fuse_` a block: decorate its class, or a predicate ``(module) -> bool``.

    Args:
        name: the name of the family.
        **fields: those of :class:`BlockRule`; usually ``branches``, ``writes`` and ``bypass``.

    Returns:
        The decorator, which returns what it decorates.

    Raises:
        ConfigError: the name is taken, or neither a class nor a predicate was decorated.

    Example:
        >>> @register_block("two", branches=("wide", "narrow"), writes="merged")
        ... class Two(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.wide = torch.nn.Conv2d(4, 4, 3, padding=1)
        ...         self.narrow = torch.nn.Conv2d(4, 4, 1)
        ...     def forward(self, x):
        ...         if hasattr(self, "merged"):
        ...             return self.merged(x)
        ...         return self.wide(x) + self.narrow(x)
        >>> model = torch.nn.Sequential(Two()).eval()
        >>> torchq.fuse_(model).fused[0].kind
        'two'
        >>> BLOCKS.remove("two")
    """

    def decorator(target: T) -> T:
        if isinstance(target, type):
            cls = target
            fields.setdefault("has", tuple(b for b in fields.get("branches", ()) if "*" not in b))
            rule = BlockRule(name=name, when=lambda block: isinstance(block, cls), **fields)
            BLOCKS.add(name, rule)
        elif callable(target):
            BLOCKS.add(name, BlockRule(name=name, when=target, **fields))
        else:
            raise ConfigError(
                f"register_block({name!r}): got {target!r}; expected a class or a predicate"
            )
        return target

    return decorator


def rule_of(block: nn.Module) -> BlockRule | None:
    """Return the rule that ``block`` is known by; rules with common names do not count."""
    for name in reversed(list(BLOCKS)):
        rule = BLOCKS[name]
        if rule.matches(block) and not rule.loose:
            return rule
    return None


# -- helpers for rules -------------------------------------------------------------------------


@contextmanager
def _bypassed(block: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Replace child modules by Identity, and put them back."""
    children = {name: getattr(block, name, None) for name in names}
    kept = {name: child for name, child in children.items() if isinstance(child, nn.Module)}
    try:
        for name in kept:
            setattr(block, name, nn.Identity())
        yield
    finally:
        for name, child in kept.items():
            setattr(block, name, child)


def attributes_like(block: nn.Module, globs: tuple[str, ...]) -> list[str]:
    """Return the attributes of ``block`` that match, in the order of ``globs``."""
    own = [
        *vars(block),
        *(name for name, _ in block.named_children()),
        *(name for name, _ in block.named_parameters(recurse=False)),
        *(name for name, _ in block.named_buffers(recurse=False)),
        # What is registered as None, and a second name of a child, is listed nowhere above.
        *(name for name in globs if "*" not in name and hasattr(block, name)),
    ]
    names = list(dict.fromkeys(own))
    return [name for glob in globs for name in names if fnmatch.fnmatchcase(name, glob)]


def main_layer(block: nn.Module, globs: tuple[str, ...]) -> nn.Module:
    """Return the first layer, or else the first BatchNorm, among the attributes that match.

    Raises:
        NotAffine: there is neither.
    """
    children = [getattr(block, name) for name in attributes_like(block, globs)]
    roots = [child for child in children if isinstance(child, nn.Module)]
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


def _write(block: Any, name: str, layer: MergedLayer) -> None:
    """Put the merged layer at ``name``: into a layer of its geometry there, else as a new one."""
    old = getattr(block, name, None)
    if is_layer(old) and geometry_of(old) == layer.geometry:
        layer.put_into(old)
        return
    if name in vars(block):  # a plain attribute would hide the child
        delattr(block, name)
    setattr(block, name, layer.make())
