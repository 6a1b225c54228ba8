"""What another maker decided about a model, which planning for a target leaves as it is."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchq.swap.plan import Decision, Plan


@dataclass(frozen=True)
class Held:
    """Layers that another maker quantized, and the ranges that their inputs have for good.

    Attributes:
        layers: their paths.
        ranges: path of the quantizer of an input -> equal objects for equal ranges; None for one
            that stays alone, as it divides channels by factors.
    """

    layers: frozenset[str] = frozenset()
    ranges: Mapping[str, Hashable] = field(default_factory=dict)

    def decided(self, plan: Plan) -> dict[str, Decision]:
        """Return path of each layer -> what is decided about it, before a target changes that."""
        return {d.name: d for d in plan.replaced if d.name in self.layers}


def layers_kept(plan: Plan, decided: Mapping[str, Decision]) -> Plan:
    """Return a plan in which layers read what they did, whatever a target would do with them."""
    rows = []
    for d in plan.decisions:
        first = decided.get(d.name)
        if first is not None:
            note = d.note if d.input == first.input else ""
            d = replace(d, input=first.input, weight=first.weight, reason="", note=note)
            d = replace(d, by=first.by, signed=(), unsigned=(), adopted=True)
        rows.append(d)
    return replace(plan, decisions=tuple(rows))


def apart(
    slots: Sequence[str],
    roots: Mapping[str, frozenset[int]],
    held: Mapping[str, Hashable],
    behind: Mapping[str, Sequence[str]],
) -> list[list[str]]:
    """Return the parts of a group of quantizers that can be one where some ranges are held.

    A quantizer without a range gets a held one if all tensors that it reads have that range
    elsewhere, or what reads its result has. Others are together where they read one tensor.

    Args:
        slots: the paths of the quantizers.
        roots: path of each -> the tensors that it reads; see :attr:`torchq.swap.facts.Value.root`.
        held: path -> the range that it has for good.
        behind: path of the quantizer of a concatenation -> those that read its result.
    """
    by_range: dict[Hashable, list[str]] = {}
    of_root: dict[int, set[Hashable]] = {}
    alone = [[slot] for slot in slots if slot in held and held[slot] is None]
    for slot in slots:
        if held.get(slot) is not None:
            by_range.setdefault(held[slot], []).append(slot)
            for root in roots.get(slot, ()):
                of_root.setdefault(root, set()).add(held[slot])
    free: list[str] = []
    for slot in slots:
        if slot in held:
            continue
        found = _only(of_root.get(root, set()) for root in roots.get(slot, ()))
        together = [slot]
        if found is None:
            readers = [s for s in behind.get(slot, ()) if s in held]
            found = _only({held[s]} for s in readers)
            together += readers
        if found is None:
            free.append(slot)
        else:
            by_range.setdefault(found, []).extend(together)
    parts = [*alone, *by_range.values()]
    for slot in free:
        touching = [p for p in parts if _reads_alike(slot, p, free, roots)]
        parts = [p for p in parts if p not in touching]
        parts.append([s for p in touching for s in p] + [slot])
    return parts


def _only(ranges: Iterable[set[Hashable]]) -> Hashable | None:
    """Return the one range that each of several tensors has; None where there is not one."""
    found = list(ranges)
    together = set[Hashable]().union(*found)
    return next(iter(together)) if len(together) == 1 and all(found) else None


def _reads_alike(
    slot: str,
    part: Sequence[str],
    free: Sequence[str],
    roots: Mapping[str, frozenset[int]],
) -> bool:
    """Return True for a part of free slots, one of which reads a tensor that the slot reads."""
    mine = roots.get(slot, frozenset())
    return part[0] in free and any(mine & roots.get(s, frozenset()) for s in part)
