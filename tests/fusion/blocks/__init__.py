"""Small blocks with the structure and attribute names of public repositories, written for tests.

One file per repository or model family. A file's ``CASES`` are merged and compared by
tests/fusion/test_families.py and replayed by tests/fusion/test_record.py.
"""

import importlib
import pkgutil

from tests.fusion.blocks.layers import Case

__all__ = ["all_cases"]


def all_cases() -> dict[str, Case]:
    """Return the cases of every file in this folder, by name."""
    actual: dict[str, Case] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        cases: dict[str, Case] = getattr(module, "CASES", {})
        assert not actual.keys() & cases.keys(), (
            f"{info.name} repeats the name of a case"
        )
        actual |= cases
    return actual
