"""What is printed of networks of others fits a screen: each call and command."""

from pathlib import Path

import pytest

from benchmarks import screens
from tests.roads.end import ROAD

pytestmark = ROAD


@pytest.mark.parametrize("name", screens.NETWORKS)
def test_each_call_fits_a_screen(name: str, tmp_path: Path) -> None:
    # ResNet-18 needs neither, and runs with the others: it takes a minute.
    pytest.importorskip("transformers")
    pytest.importorskip("ultralytics")
    found = dict(screens.measure(name, tmp_path))
    counts = {call: len(lines) for call, lines in found.items()}
    print(f"\n{name}: {counts}")
    assert max(counts.values()) <= screens.SCREEN
