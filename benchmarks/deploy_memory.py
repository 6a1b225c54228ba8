"""Measure the memory of a network that has run: FP32 and deployed, from a file or a mapped one.

Each candidate is loaded and run in a process of its own, on one image size and then on more. The
report says by how much the process has grown once freed memory is given back. ``anonymous`` memory
belongs to the process. ``file`` memory holds pages of mapped files, which processes share and the
system takes back when it needs them. Linux with the GNU C library only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import torchq
from benchmarks.deploy import build, quantized
from benchmarks.harness import Reporter, parse, parser

MODELS = ("resnet50", "vit_b_16", "encoder")
#: Candidate -> which file, and how it is used.
CANDIDATES = {
    "fp32": ("fp32", "read"),
    "int8": ("int8", "read"),
    "int8, mapped": ("int8", "mapped"),
    "int8, ONNX Runtime": ("onnxruntime", "read"),
    "int8, OpenVINO": ("openvino", "read"),
}
#: Engines whose modules have files of the same name, where they are installed.
ENGINES = ("onnxruntime", "openvino")
_MIB = 2**20


class Small(nn.Module):
    """A network that makes torch fill its own tables, which all later networks share.

    torch lists its functions when the first graph that calls one is loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 3), nn.Linear(576, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(torch.relu(self.conv(x)), 1))


def resident() -> dict[str, int]:
    """Return the bytes of anonymous and of file memory of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return {
        name: int(fields[field]) * 1024
        for name, field in (("anonymous", "RssAnon"), ("file", "RssFile"))
    }


def measure(path: str, use: str, warm: str) -> dict[str, float]:
    """Return the growth in MiB after loading, after the first input, and after all inputs.

    Args:
        path: the file of a candidate; that of its inputs is beside it.
        use: ``"read"`` the file, or ``"mapped"``.
        warm: the file of small networks that load the libraries before the first measurement.
    """
    with suppress(ImportError):  # a float network's classes are there
        import_module("torchvision")
    for small, x in torch.load(warm, weights_only=False):
        small(x)
    inputs = torch.load(Path(path).with_name("inputs"))
    before = resident()
    model = torch.load(path, weights_only=False, mmap=use == "mapped")
    found = {}
    for state, xs in (("loaded", []), ("one_size", inputs[:1] * 2), ("all_sizes", inputs)):
        for x in xs:
            model(x)
        now = resident()
        found |= {
            f"{state}_{kind}_mib": round((now[kind] - before[kind]) / _MIB, 1) for kind in now
        }
    return found


def save(name: str, folder: Path) -> None:
    """Write the files of the candidates, and one of small networks that load the libraries."""
    model, x = build(name, 1)
    inputs = (
        [x]
        if name != "resnet50"
        else [torch.randn(1, 3, size, size) for size in (224, 192, 256, 288)]
    )
    torch.save(inputs, folder / "inputs")
    torch.save(model, folder / "fp32")
    torch.save(torchq.deploy(quantized(model, x)), folder / "int8")
    small, image = Small().eval(), torch.randn(1, 3, 8, 8)
    warm = [(small, image), (torchq.deploy(quantized(small, image)), image)]
    torch.save(warm, folder / "warm fp32")
    torch.save(warm, folder / "warm int8")
    # Each engine by itself: what one has freed in memory that is in use would count for others.
    for engine in filter(find_spec, ENGINES):
        modules = [
            torchq.deploy(quantized(m, example, engine), example, engine=engine)
            for m, example in ((model, x), (small, image))
        ]
        torch.save(modules[0], folder / engine)
        torch.save([*warm, (modules[1], image)], folder / f"warm {engine}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every candidate in a process of its own and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    arguments.add_argument(
        "--measure",
        nargs=3,
        metavar=("FILE", "USE", "WARM"),
        help="what the processes are started with",
    )
    options = parse(arguments, argv)
    with torch.no_grad():
        if options.measure:
            print(json.dumps(measure(*options.measure)))
            return
        with Reporter("deploy_memory", options.out) as report:
            for name in options.models:
                with tempfile.TemporaryDirectory() as folder:
                    save(name, Path(folder))
                    for candidate, (file, use) in CANDIDATES.items():
                        if not Path(folder, file).exists():
                            continue
                        paths = [f"{folder}/{file}", use, f"{folder}/warm {file}"]
                        command = [
                            sys.executable,
                            "-m",
                            "benchmarks.deploy_memory",
                            "--threads",
                            str(options.threads),
                            "--measure",
                            *paths,
                        ]
                        done = subprocess.run(command, check=True, capture_output=True, text=True)
                        report.value(model=name, candidate=candidate, **json.loads(done.stdout))


if __name__ == "__main__":
    main()
