"""The integer program: one format for each group of layers, least damage within the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchq.errors import ConfigError
from torchq.utils.optional import import_optional

__all__ = ["Problem", "Solution"]


@dataclass(frozen=True)
class Solution:
    """A choice for each group.

    Attributes:
        choices: for each group the index of its format.
        damage: the sum over groups.
        costs: the sums by kind of budget.
    """

    choices: tuple[int, ...]
    damage: float
    costs: dict[str, float]


@dataclass(frozen=True)
class Problem:
    """Damages and costs of each group in each format.

    Attributes:
        damages: for each group, for each format; infinity rules a format out.
        costs: kind of budget -> for each group, for each format.
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
        """Return the choice with the least damage within a budget; None where there is none.

        The solver is HiGHS, behind ``scipy.optimize.milp``. It is deterministic. A group takes
        *at least* one format; a second one would only add to damage and costs. With "exactly one"
        HiGHS 1.11 prints a line to standard output now and then.

        Args:
            budget: kind -> the most that the sum may be.
        """
        optimize = import_optional("scipy.optimize", "mixed_precision", "report")
        count = len(self.damages[0])
        size = len(self.damages) * count
        flat = [damage for row in self.damages for damage in row]
        worst = max((abs(d) for d in flat if math.isfinite(d)), default=0.0) or 1.0
        objective = [d / worst if math.isfinite(d) else 0.0 for d in flat]
        constraints = [
            optimize.LinearConstraint([float(i // count == group) for i in range(size)], lb=1)
            for group in range(len(self.damages))
        ]
        for kind, bound in budget.items():
            row = [cost / bound for costs in self.costs[kind] for cost in costs]
            constraints.append(optimize.LinearConstraint(row, ub=1 + 1e-9))
        found = optimize.milp(
            objective,
            constraints=constraints,
            integrality=[1] * size,
            bounds=optimize.Bounds([0] * size, [float(math.isfinite(d)) for d in flat]),
            options={"mip_rel_gap": 0.0},
        )
        return None if found.x is None else self._solution(found.x, count)

    def _solution(self, values: Sequence[float], count: int) -> Solution:
        choices = tuple(
            min((f for f in range(count) if values[g * count + f] > 0.5), key=row.__getitem__)
            for g, row in enumerate(self.damages)
        )
        damage = sum(self.damages[g][f] for g, f in enumerate(choices))
        costs = {
            kind: sum(rows[g][f] for g, f in enumerate(choices))
            for kind, rows in self.costs.items()
        }
        return Solution(choices, damage, costs)

    def front(self, kind: str, others: Mapping[str, float], count: int) -> list[Solution]:
        """Return solutions that no other one beats in both damage and cost, the cheapest first.

        Args:
            kind: the budget that varies, between the least and the greatest possible cost.
            others: budgets that hold as they are.
            count: how many budgets are tried.
        """
        low, high = self.bounds(kind)
        if low <= 0 or count < 2:
            tried = [high]
        else:
            tried = [low * (high / low) ** (i / (count - 1)) for i in range(count)]
        found: list[Solution] = []
        for bound in tried:
            solution = self.solve({**others, kind: max(bound, 1e-30) * (1 + 1e-9)})
            if solution is not None and (not found or solution.damage < found[-1].damage):
                found.append(solution)
        return found

    def require(self, budget: Mapping[str, float]) -> Solution:
        """Return :meth:`solve`.

        Raises:
            ConfigError: Nothing is within the budget; the text names the least that is possible.
        """
        found = self.solve(budget)
        if found is not None:
            return found
        least = ", ".join(f"{kind}={self.bounds(kind)[0]:.6g}" for kind in budget)
        asked = ", ".join(f"{kind}={bound:.6g}" for kind, bound in budget.items())
        raise ConfigError(
            f"mixed_precision: got the budget {asked}; expected at least {least}, the least that "
            "these formats need. Raise the budget or add smaller formats"
        )
