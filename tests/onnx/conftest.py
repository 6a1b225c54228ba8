"""Where tests write their files."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file that is not there yet."""
    return tmp_path / "m.onnx"
