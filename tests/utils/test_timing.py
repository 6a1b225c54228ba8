"""The timer within a budget; benchmarks/harness.py shows the rest, in tests/benchmarks."""

import gc

from torchq.utils.timing import time_calls


def test_a_budget_ends_the_rounds_but_the_least_ones() -> None:
    now = 0.0
    collected = []

    def call() -> None:
        nonlocal now
        now += 1.0
        collected.append(gc.isenabled())

    few = {"rounds": 9, "warmup": 0, "min_time": 0.0, "clock": lambda: now}
    found = {
        budget: time_calls({"a": call, "b": call}, least=3, budget=budget, **few)  # type: ignore[arg-type]
        for budget in (0.0, 9.0, 100.0)
    }
    assert [len(both["b"].seconds) for both in found.values()] == [3, 5, 9]
    assert found[100.0]["a"].median == 1.0
    assert found[100.0]["a"].calls == 1
    assert gc.isenabled()
    assert not all(collected[-2:])  # none in the middle of a sample
