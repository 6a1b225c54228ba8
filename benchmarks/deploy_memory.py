"""Measure the memory of a network that has run: FP32 and deployed, from a file or a mapped one.

Each candidate is loaded and run in a process of its own. The report says by how much the process
has grown once freed memory is given back. ``anonymous`` memory belongs to the process. ``file``
memory holds pages of mapped files, which processes share and the system takes back when it needs
them. Linux with the GNU C library only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
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
}
_MIB = 2**20


class Small(nn.Module):
    """A network that makes torch fill its own tables, which all later networks share.

    torch lists its functions when the first graph that calls one is loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Linear(576, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(torch.relu(self.conv(x)), 1))


def resident() -> dict[str, int]:
    """Return the bytes of anonymous and of file memory of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = {
        line.partition(":")[0]: line.split()[1]
        for line in lines
        if line.startswith("Rss")
    }
    return {
        name: int(fields[field]) * 1024
        for name, field in (("anonymous", "RssAnon"), ("file", "RssFile"))
    }


def measure(path: Path, use: str) -> dict[str, float]:
    """Return the growth in MiB after loading a file, and after its model has run twice.

    Args:
        path: the file of a candidate; its input, and small networks that load the libraries before
            the first measurement, are beside it.
        use: ``"read"`` the file, or ``"mapped"``.
    """
    with suppress(ImportError):  # a float network's classes are there
        import_module("torchvision")
    for small, image in torch.load(path.with_name("warm"), weights_only=False):
        small(image)
    x = torch.load(path.with_name("input"))
    before = resident()
    model = torch.load(path, weights_only=False, mmap=use == "mapped")
    growth = {}
    for state, calls in (("loaded", 0), ("one_size", 2)):
        for _ in range(calls):
            model(x)
        now = resident()
        growth |= {
            f"{state}_{kind}_mib": round((now[kind] - before[kind]) / _MIB, 1)
            for kind in now
        }
    return growth


def save(name: str, folder: Path) -> None:
    """Write the files of the candidates, and one of small networks that load the libraries."""
    model, x = build(name, 1)
    torch.save(x, folder / "input")
    torch.save(model, folder / "fp32")
    torch.save(torchq.deploy(quantized(model, x)), folder / "int8")
    small = Small().eval()
    image = torch.randn(1, 3, 8, 8)
    torch.save(
        [(m, image) for m in (small, torchq.deploy(quantized(small, image)))],
        folder / "warm",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every candidate in a process of its own and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    arguments.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parse(arguments, argv)
    with torch.no_grad():
        if options.measure:
            path, use = options.measure
            print(json.dumps(measure(Path(path), use)))
            return
        with Reporter("deploy_memory", options.out) as report:
            for name in options.models:
                with tempfile.TemporaryDirectory() as folder:
                    save(name, Path(folder))
                    for candidate, (file, use) in CANDIDATES.items():
                        command = [sys.executable, "-m", "benchmarks.deploy_memory"]
                        command += ["--threads", str(options.threads)]
                        command += ["--measure", f"{folder}/{file}", use]
                        done = subprocess.run(
                            command, check=True, capture_output=True, text=True
                        )
                        report.value(
                            model=name, candidate=candidate, **json.loads(done.stdout)
                        )


if __name__ == "__main__":
    main()
