"""One format for each group of layers, with little damage within the budget."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.errors import ConfigError

#: Share of a bound that may be taken; sums of many numbers are rounded.
_ALLOWED = 1 + 1e-9


@dataclass(frozen=True)
class Problem:
    """Damages, and costs by kind of budget, (groups, formats) each.

    A damage of infinity rules a format out.
    """

    damages: Tensor
    costs: Mapping[str, Tensor]

    def figures(self, choices: Sequence[int]) -> tuple[float, dict[str, float]]:
        """Return the damage and the costs of a format for each group."""
        place = torch.arange(len(choices)), list(choices)
        costs = {kind: float(rows[place].sum()) for kind, rows in self.costs.items()}
        return float(self.damages[place].sum()), costs

    def bounds(self, kind: str) -> tuple[float, float]:
        """Return the least and the greatest cost that is possible."""
        allowed = self.damages.isfinite()
        least, most = (self.costs[kind].where(allowed, end) for end in (math.inf, -math.inf))
        return float(least.amin(1).sum()), float(most.amax(1).sum())

    def solve(self, budget: Mapping[str, float]) -> list[int] | None:
        """Return a choice with little damage within a budget; None where none was found.

        From the least damage, and from the least cost, each step takes the change of one group that
        does the least damage for what it saves. Then single changes and pairs of them are made as
        long as they help; the better one of both results counts.
        """
        shares = torch.stack([self.costs[kind] / bound for kind, bound in budget.items()])
        allowed = self.damages.isfinite()
        starts = [_least(self.damages, shares.sum(0))]
        starts.append(_least(shares.amax(0).where(allowed, math.inf), self.damages))
        within = [_within(self.damages, shares, start) for start in starts]
        found = [_improved(self.damages, shares, choice) for choice in within if choice]
        return min(found, key=lambda choice: self.figures(choice)[0], default=None)

    def front(self, budget: Mapping[str, float], count: int) -> list[list[int]]:
        """Return choices that no other one beats in both damage and cost, the cheapest first.

        ``count`` bounds of the first kind of budget are tried, between the least and the greatest
        possible cost; the others hold as they are.
        """
        kind = next(iter(budget))
        low, high = self.bounds(kind)
        steps = range(count) if low > 0 else []
        tried = [low * (high / low) ** (i / (count - 1)) for i in steps] or [high]
        found: list[list[int]] = []
        for bound in tried:
            choice = self.solve({**budget, kind: max(bound, 1e-30) * _ALLOWED})
            damages = [self.figures(c)[0] for c in (choice, *found[-1:]) if c is not None]
            if choice is not None and (not found or damages[0] < damages[1]):
                found.append(choice)
        return found

    def require(self, budget: Mapping[str, float]) -> list[int]:
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
    """Return for each row the place of the least ``first``, of equals that of the least second."""
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
