"""What each road costs: the lines of its test and its seconds of processor time."""

import inspect
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def cost(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print the lines and seconds of a road, behind the line that says where it arrives."""
    start = time.process_time()
    yield
    lines = len(inspect.getsource(request.function).splitlines())
    seconds = time.process_time() - start
    print(f"  {request.node.name}: {lines} lines, {seconds:.0f} s of processor time")
    assert seconds < 300  # the time of a road
