from __future__ import annotations

import subprocess
import sys

import pytest

import torchq

SATURATION = """
import warnings, torch, torchq
torch.manual_seed(0)
layers = torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
model = torch.nn.Sequential(*layers).eval()
torch.nn.init.constant_(model[0].weight, 1.0)
x = torch.rand(16, 256) - 0.1
torchq.quantize_(model)
torchq.calibrate(model, [x], progress=False)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torchq.deploy(model)
    texts = [str(w.message) for w in caught]
reduced = torchq.deploy(model, reduce_range=True)
assert torchq.lowering.ops.onednn.saturates() == ("EXPECTED" == "yes"), "saturates"
assert any("no VNNI" in t for t in texts) == ("EXPECTED" == "yes"), texts
error = (reduced(x) - model(x)).norm() / model(x).norm()
assert error < 0.05, error  # 7 bits
"""


@pytest.mark.skipif(not torchq.lowering.ops.onednn.available(), reason="no oneDNN kernels")
@pytest.mark.parametrize(("isa", "expected"), [("AVX2", "yes"), ("DEFAULT", "no")])
def test_cpus_without_vnni_are_noticed(isa: str, expected: str) -> None:
    if expected == "no" and torchq.lowering.ops.onednn.saturates():
        pytest.skip("this CPU has no VNNI")
    environment = {
        "ONEDNN_MAX_CPU_ISA": isa,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SATURATION.replace("EXPECTED", expected)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
