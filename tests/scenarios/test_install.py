"""Install and import: not even torch is loaded at first, and no extra, CUDA context or warning."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = (
    "onnx",
    "onnxruntime",
    "onnxscript",
    "openvino",
    "sklearn",
    "matplotlib",
    "torchvision",
    "triton",
    "absl",
    "scipy",
    "yaml",
)
#: Parts of torch that take seconds, and that torch itself loads when they are used.
LATE = (
    "torch._dynamo",
    "torch._inductor",
    "torch.onnx._internal",
    "torch.export",
    "sympy",
)
CODE = f"""
import sys, warnings
import torchq
print("early", sorted(set(sys.modules) & {{"torch", "numpy", "tqdm"}}))
import torch, tqdm.auto
before = set(sys.modules)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from torchq import *
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print("extras", sorted(new & set({EXTRAS!r})))
late = {LATE!r}
print("late", sorted(n for n in set(sys.modules) - before if n.startswith(late)))
old = ("torch.ao", "torch.quantization")
print("deprecated", sorted(n for n in set(sys.modules) - before if n.startswith(old)))
print("cuda", torch.cuda.is_initialized())
print("warnings", [str(w.message) for w in caught if "torchq" in w.filename])
model = torch.nn.Sequential(torch.nn.Linear(4, 2))
torchq.quantize_(model)
torchq.calibrate(model, [torch.ones(1, 4)], progress=False)
print("runs", model(torch.ones(1, 4)).shape == (1, 2))
"""


def test_s01_import_needs_only_torch() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    flags = ["-W", "error::DeprecationWarning:torchq"]
    done = subprocess.run(
        [sys.executable, *flags, "-c", CODE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "early []",
        "extras []",
        "late []",
        "deprecated []",
        "cuda False",
        "warnings []",
        "runs True",
    ], done.stdout
