"""What each road costs, in lines and seconds; and a detector of Ultralytics, for several roads."""

import inspect
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.roads.detectors import Trained


@pytest.fixture(autouse=True)
def cost(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print the lines and seconds of a road, behind the line that says where it arrives."""
    start = time.process_time()
    yield
    lines = len(inspect.getsource(request.function).splitlines())
    seconds = time.process_time() - start
    print(f"  {request.node.name}: {lines} lines, {seconds:.0f} s of processor time")
    assert seconds < 300  # the time of a road


@pytest.fixture(scope="session")
def yolo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLO_CONFIG_DIR", str(tmp_path_factory.mktemp("settings")))
        patch.setenv("YOLO_OFFLINE", "True")
        yield pytest.importorskip("ultralytics", reason="the road is Ultralytics'").YOLO


@pytest.fixture(scope="session")
def detector(yolo: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(yolo, "yolov8n.yaml", tmp_path_factory.mktemp("detect"))


@pytest.fixture(scope="session")
def segmenter(yolo: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(yolo, "yolov8n-seg.yaml", tmp_path_factory.mktemp("segment"))
