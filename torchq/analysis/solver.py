"""One format for each group of layers, with little damage within the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.errors import ConfigError

#: Share of a bound that may be taken; sums of many numbers are rounded.
_ALLOWED = 1 + 1e-9


@dataclass(frozen=True)
class Solution:
    """The index of a format for each group, with sums over groups; costs are by kind of budget."""

    choices: tuple[int, ...]
    damage: float
    costs: dict[str, float]


@dataclass(frozen=True)
class Problem:
    """Damages, and costs by kind of budget: for each group a row with a number for each format.

    A damage of infinity rules a format out.
    """

    damages: Sequence[Sequence[float]]
    costs: Mapping[str, Sequence[Sequence[float]]]

    def bounds(self, kind: str) -> tuple[float, float]:
        """Return the least and the greatest cost that is possible."""
        allowed = [
            [cost for cost, damage in zip(row, damages, strict=True) if math.isfinite(damage)]
            for row, damages in zip(self.costs[kind], self.damages, strict=True)
        ]
        return sum(map(min, allowed)), sum(map(max, allowed))

    def solve(self, budget: Mapping[str, float]) -> Solution | None:
        """Return a choice with little damage within a budget; None where none was found.

        From the least damage, and from the least cost, each step takes the change of one group that
        does the least damage for what it saves. Then single changes and pairs of them are made as
        long as they help; the better one of both results counts.
        """
        damages = torch.tensor(self.damages, dtype=torch.float64, device="cpu")
        shares = torch.stack(
            [
                torch.tensor(self.costs[kind], dtype=torch.float64, device="cpu") / bound
                for kind, bound in budget.items()
            ]
        )
        starts = [_least(damages, shares.sum(0))]
        starts.append(_least(shares.amax(0).where(damages.isfinite(), math.inf), damages))
        feasible = [found for start in starts if (found := _within(damages, shares, start))]
        solutions = [self._solution(_improved(damages, shares, found)) for found in feasible]
        return min(solutions, key=lambda solution: solution.damage, default=None)

    def _solution(self, choices: Sequence[int]) -> Solution:
        damage = sum(self.damages[g][f] for g, f in enumerate(choices))
        costs = {
            kind: sum(rows[g][f] for g, f in enumerate(choices))
            for kind, rows in self.costs.items()
        }
        return Solution(tuple(choices), damage, costs)

    def front(self, kind: str, others: Mapping[str, float], count: int) -> list[Solution]:
        """Return solutions that no other one beats in both damage and cost, the cheapest first.

        ``count`` budgets of one kind are tried, between the least and the greatest possible cost;
        the others hold as they are.
        """
        low, high = self.bounds(kind)
        steps = range(count) if low > 0 else []
        tried = [low * (high / low) ** (i / (count - 1)) for i in steps] or [high]
        found: list[Solution] = []
        for bound in tried:
            solution = self.solve({**others, kind: max(bound, 1e-30) * (1 + 1e-9)})
            if solution is not None and (not found or solution.damage < found[-1].damage):
                found.append(solution)
        return found

    def require(self, budget: Mapping[str, float]) -> Solution:
        """Return :meth:`solve`; an error names the least that is possible."""
        found = self.solve(budget)
        if found is not None:
            return found
        least = ", ".join(f"{kind}={self.bounds(kind)[0]:.6g}" for kind in budget)
        asked = ", ".join(f"{kind}={bound:.6g}" for kind, bound in budget.items())
        raise ConfigError(
            f"mixed_precision: got the budget {asked}; expected at least {least}, the least that "
            "these formats need. Raise the budget or add smaller formats"
        )


def _least(first: Tensor, second: Tensor) -> list[int]:
    """Return for each row the place of the least ``first``, and among equals of the least second.

    Both have the shape (groups, formats).
    """
    tied = first == first.amin(1, keepdim=True)
    return second.where(tied, math.inf).argmin(1).tolist()


def _changes(table: Tensor, choice: list[int]) -> Tensor:
    """Return what each change of one group adds; the last axis of a table holds the formats."""
    place = torch.tensor(choice, device="cpu").expand(table.shape[:-1]).unsqueeze(-1)
    return table - table.gather(-1, place)


def _sums(shares: Tensor, choice: list[int]) -> Tensor:
    """Return the share of each bound that a choice takes; shape (kinds,)."""
    return shares[:, torch.arange(len(choice)), choice].sum(1)


def _within(damages: Tensor, shares: Tensor, choice: list[int]) -> list[int] | None:
    """Return a choice within all bounds by steps of the least damage for what they save."""
    choice = list(choice)
    while True:
        sums = _sums(shares, choice)
        over = (sums - _ALLOWED).clamp(min=0).sum()
        if over <= 0:
            return choice
        after = (sums[:, None, None] + _changes(shares, choice) - _ALLOWED).clamp(min=0).sum(0)
        saved = over - after
        worse = _changes(damages, choice)
        price = (worse / saved).where((saved > 1e-15) & worse.isfinite(), math.inf)
        group, format = divmod(int(price.argmin()), price.shape[1])
        if not math.isfinite(price[group, format]):
            return None
        choice[group] = format


def _improved(damages: Tensor, shares: Tensor, choice: list[int]) -> list[int]:
    """Return a choice that no change of one or two groups betters within the bounds."""
    choice, (groups, formats) = list(choice), damages.shape
    count = damages.numel()
    owners = torch.arange(groups, device="cpu").repeat_interleave(formats)
    least = -1e-12 * float(damages.where(damages.isfinite(), 0).abs().max())
    while True:
        room = _ALLOWED - _sums(shares, choice)
        worse, more = _changes(damages, choice).flatten(), _changes(shares, choice).flatten(1)
        fits = (more <= room[:, None]).all(0)
        gain = (worse / more.sum(0).clamp(min=1e-15)).where(fits & (worse < least), 0.0)
        changes = [int(gain.argmin())]
        if not gain.min() < 0:
            fits = ((more[:, :, None] + more[:, None, :]) <= room[:, None, None]).all(0)
            fits &= owners[:, None] != owners[None, :]
            pairs = (worse[:, None] + worse[None, :]).where(fits, math.inf)
            changes = list(divmod(int(pairs.argmin()), count))
            if not pairs.min() < least:
                return choice
        for change in changes:
            choice[change // formats] = change % formats
