"""super-gradients: its own tests of its quantizer, on the old names.

Its releases ask for other versions of numpy, onnx and onnxruntime than torchq, so it is not in the
environment of ``make test-roads``. Where ``TORCHQ_SUPER_GRADIENTS`` is the folder of a checkout
whose requirements are met, its tests run here, and a YOLO-NAS is quantized by it.
tests/compat/test_super_gradients.py has what it does with the old classes in any environment.
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.roads.end import ROAD

pytestmark = ROAD

VARIABLE = "TORCHQ_SUPER_GRADIENTS"
ROOT = Path(__file__).resolve().parents[2]
#: What downloads trained weights.
DOWNLOADING = "matches_pytorch_quantization"


@pytest.fixture
def checkout() -> Path:
    folder = os.environ.get(VARIABLE)
    if folder is None:
        pytest.skip(f"{VARIABLE} names no checkout of super-gradients")
    return Path(folder)


def run(checkout: Path, folder: Path, *arguments: str) -> str:
    """Run a script or module with the old names and the checkout; what it prints."""
    command = [sys.executable, "-W", "ignore", "-m", "torchq.compat", *arguments]
    paths = [str(ROOT), str(checkout / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_its_own_tests_pass(checkout: Path, tmp_path: Path) -> None:
    tests = checkout / "tests" / "unit_tests" / "quantization_utility_tests.py"
    if not tests.exists():
        pytest.skip("the folder has the package alone, without its tests")
    report = tmp_path / "report.xml"
    arguments = ["-q", "-k", f"not {DOWNLOADING}", f"--junitxml={report}", str(tests)]
    run(checkout, tmp_path, "-m", "pytest", *arguments)
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "skipped")}
    print(f"\nsuper-gradients: {counts['tests']} of its own tests")
    assert counts["tests"] > 10
    assert not counts["skipped"]


def test_yolo_nas_is_on_integers_but_for_its_heads(
    checkout: Path, tmp_path: Path
) -> None:
    script = str(Path(__file__).parent / "yolo_nas.py")
    printed = run(checkout, tmp_path, script, str(tmp_path / "net.onnx"))
    report = json.loads(printed.splitlines()[-1])
    print(f"\nYOLO-NAS: {report['share']:.1%} on integers")
    assert report["verified"]
    assert not report["norms"]
    assert report["float"] and all("heads" in name for name in report["float"])
    assert report["share"] > 0.9
