"""super-gradients: its own tests of its quantizer, on the old names.

Its releases ask for other versions of numpy, onnx and onnxruntime than torchq, so it is not in the
environment of ``make test-roads``. Where ``TORCHQ_SUPER_GRADIENTS`` is the folder of a checkout
whose requirements are met, its tests run here. tests/compat/test_super_gradients.py has what it
does with the old classes in any environment.
"""

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


def test_its_own_tests_pass(checkout: Path, tmp_path: Path) -> None:
    tests = checkout / "tests" / "unit_tests" / "quantization_utility_tests.py"
    report = tmp_path / "report.xml"
    command = [sys.executable, "-W", "ignore", "-m", "torchq.compat", "-m", "pytest"]
    command += ["-q", "-k", f"not {DOWNLOADING}", f"--junitxml={report}", str(tests)]
    paths = [str(ROOT), str(checkout / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={**environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "skipped")}
    print(f"\nsuper-gradients: {counts['tests']} of its own tests")
    assert counts["tests"] > 10
    assert not counts["skipped"]
