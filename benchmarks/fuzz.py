"""Feed mutated files to everything that reads a file: only named errors may come out.

``load`` and ``load_model`` read mutated checkpoints, ``inspect``, ``verify`` and
``from_onnx`` mutated ONNX files, ``from_onnx_old`` those that PyTorch exported years ago (of the
package onnx), ``config`` mutated JSON, and four readers files of MXNet and Caffe, those of the
tests. A reader passes if it returns, or raises a subclass of ``TorchqError``. It fails with any
other exception, beyond the limits on time and memory, if the process dies, if a refused checkpoint
has changed the model, or if an accepted one holds a range that is negative or not finite.

Mutations are numbered; ``--only load:17`` repeats one. They run in child processes with a limit on
memory, and each has a limit on time.

Example:
    python -m benchmarks.fuzz --count 20000 --out benchmarks/results/fuzz_files.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.fuzz_mutations import (
    mutate_bytes,
    mutate_checkpoint,
    mutate_json,
    mutate_onnx,
)
from benchmarks.harness import Reporter
from torchq.errors import TorchqError

# For one mutation; the readers need less than 0.2 s for the files as they were written.
SECONDS = 20
GIGABYTES = (
    12  # of address space: torch and ONNX Runtime map about 6 before they read anything
)
CHUNK = 1000  # mutations for each child process


class Net(nn.Module):
    """A small network with a residual addition, BatchNorm and a linear head. Input (N, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        return self.head((x + self.body(x)).mean((2, 3)))


def example() -> Tensor:
    """Return the one batch of all models here."""
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def write_corpus(folder: Path) -> None:
    """Write the files that are mutated: checkpoints, ONNX files and configurations."""
    torch.manual_seed(0)
    cases: list[tuple[str, Any, str | None]] = [
        ("int8", torchq.recipes.int8(), None),
        ("onnxruntime", torchq.recipes.int8(), "onnxruntime"),
        ("w4a4", torchq.recipes.w4a4(), None),
    ]
    for name, recipe, target in cases:
        model = Net().eval()
        torchq.fuse_(model)
        torchq.quantize_(
            model, recipe, target=target, example=example() if target else None
        )
        torchq.calibrate(model, [example()], progress=False)
        torchq.save(model, folder / f"{name}.pt")
        (folder / f"{name}.json").write_text(recipe.to_json(), encoding="utf-8")
        if name != "w4a4":
            torchq.export_onnx(model, example(), folder / f"{name}.onnx", target=target)


# --- readers -------------------------------------------------------------------------------------


def _state(model: nn.Module) -> list[Any]:
    tensors = [(name, x.clone()) for name, x in model.state_dict().items()]
    return [[(name, type(m)) for name, m in model.named_modules()], tensors]


def _equal(a: list[Any], b: list[Any]) -> bool:
    return a[0] == b[0] and all(
        x[0] == y[0] and torch.equal(x[1], y[1])
        for x, y in zip(a[1], b[1], strict=True)
    )


def _check_ranges(model: nn.Module) -> None:
    for name, quantizer in model.named_modules():
        amax = quantizer.amax if isinstance(quantizer, torchq.TensorQuantizer) else None
        if amax is not None and not bool(((amax >= 0) & amax.isfinite()).all()):
            raise AssertionError(f"accepted a bad range in {name}: {amax}")


def _checkpoint(rng: Random, folder: Path) -> Path:
    path = folder / "mutated.pt"
    mutate_checkpoint(
        rng, folder / f"{rng.choice(['int8', 'onnxruntime', 'w4a4'])}.pt", path
    )
    return path


def read_load(rng: Random, folder: Path) -> None:
    """Load a mutated checkpoint into a float model, or into a quantized one."""
    path = _checkpoint(rng, folder)
    model = Net().eval()
    if rng.random() < 0.3:
        torchq.quantize_(model)
    before = _state(model)
    try:
        torchq.load(model, path)
    except TorchqError:
        if not _equal(before, _state(model)):
            raise AssertionError("a refused file changed the model") from None
        raise
    _check_ranges(model)
    with torch.no_grad():
        model(example())


def read_load_model(rng: Random, folder: Path) -> None:
    """Build a model from a mutated checkpoint."""
    _check_ranges(torchq.load_model(Net, _checkpoint(rng, folder)))


def _onnx_file(rng: Random, folder: Path) -> Path:
    path = folder / "mutated.onnx"
    mutate_onnx(rng, folder / f"{rng.choice(['int8', 'onnxruntime'])}.onnx", path)
    return path


def read_inspect(rng: Random, folder: Path) -> None:
    """Inspect a mutated ONNX file."""
    str(torchq.inspect_onnx(_onnx_file(rng, folder)))


def read_verify(rng: Random, folder: Path) -> None:
    """Compare a mutated ONNX file with its model."""
    name = rng.choice(["int8", "onnxruntime"])
    path = folder / "mutated.onnx"
    mutate_onnx(rng, folder / f"{name}.onnx", path)
    str(torchq.verify_onnx(copy.deepcopy(_model_of(folder, name)), path, [example()]))


@cache
def _model_of(folder: Path, name: str) -> nn.Module:
    """Return the model of an ONNX file; loading it takes longer than most mutated files do."""
    model = Net().eval()
    torchq.fuse_(model)
    return torchq.load(model, folder / f"{name}.pt").eval()


def read_config(rng: Random, folder: Path) -> None:
    """Read a mutated configuration, and use it."""
    source = folder / f"{rng.choice(['int8', 'w4a4'])}.json"
    config = torchq.QuantConfig.from_json(
        mutate_json(rng, source.read_text(encoding="utf-8"))
    )
    model = Net().eval()
    torchq.quantize_(model, config)
    with torch.no_grad():
        model(example())


FILES = Path(__file__).parents[1] / "tests" / "frontends"
OLD = (
    "test_BatchNorm2d_eval", "test_Conv2d_groups", "test_ConvTranspose2d", "test_Embedding",
    "test_Linear", "test_MaxPool2d_stride_padding_dilation", "test_PReLU_2d", "test_Softmin",
)  # fmt: skip


def read_from_onnx(rng: Random, folder: Path) -> None:
    """Read a mutated file of torchq's own export as a model."""
    torchq.from_onnx(_onnx_file(rng, folder))


def read_old_onnx(rng: Random, folder: Path) -> None:
    """Read a mutated file that PyTorch exported years ago as a model."""
    import onnx

    models = (
        Path(onnx.__file__).parent / "backend" / "test" / "data" / "pytorch-converted"
    )
    path = folder / "mutated.onnx"
    mutate_onnx(rng, models / rng.choice(OLD) / "model.onnx", path)
    torchq.from_onnx(path)


def _mxnet(rng: Random) -> tuple[str, bytes]:
    name = rng.choice(["classifier", "convolutions", "movement", "slices"])
    symbol = FILES / "mxnet_files" / f"{name}-symbol.json"
    params = FILES / "mxnet_files" / f"{name}-0000.params"
    return symbol.read_text(encoding="utf-8"), params.read_bytes()


def read_symbol(rng: Random, folder: Path) -> None:
    """Read a mutated symbol of MXNet."""
    symbol, params = _mxnet(rng)
    path = folder / "mutated-symbol.json"
    path.write_text(mutate_json(rng, symbol), encoding="utf-8")
    torchq.from_mxnet(path, params)


def read_params(rng: Random, folder: Path) -> None:
    """Read mutated arrays of MXNet."""
    symbol, params = _mxnet(rng)
    torchq.from_mxnet(symbol, mutate_bytes(rng, params))


def _caffe(rng: Random) -> list[bytes]:
    name = rng.choice(["classifier", "detector", "operators"])
    paths = (
        FILES / "caffe_files" / f"{name}.{end}" for end in ("prototxt", "caffemodel")
    )
    return [path.read_bytes() for path in paths]


def read_network(rng: Random, folder: Path) -> None:
    """Read a mutated network of Caffe."""
    network, weights = _caffe(rng)
    path = folder / "mutated.prototxt"
    path.write_bytes(mutate_bytes(rng, network))
    torchq.from_caffe(path, weights)


def read_weights(rng: Random, folder: Path) -> None:
    """Read mutated weights of Caffe."""
    network, weights = _caffe(rng)
    torchq.from_caffe(network.decode(), mutate_bytes(rng, weights))


READERS: dict[str, Callable[[Random, Path], None]] = {
    "load": read_load,
    "load_model": read_load_model,
    "inspect": read_inspect,
    "verify": read_verify,
    "config": read_config,
    "from_onnx": read_from_onnx,
    "from_onnx_old": read_old_onnx,
    "mxnet_symbol": read_symbol,
    "mxnet_params": read_params,
    "caffe_network": read_network,
    "caffe_weights": read_weights,
}


# --- running -------------------------------------------------------------------------------------


class OutOfTime(BaseException):
    """Ends a mutation that runs too long; no ``except Exception`` holds it back."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


def attempt(reader: str, number: int, folder: Path) -> str:
    """Run one mutation; return ``"read"``, the name of a named error, or ``"FAIL: ..."``."""
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            READERS[reader](Random(f"{reader}:{number}"), folder)
    except TorchqError as error:
        return type(error).__name__
    except OutOfTime:
        return f"FAIL: more than {SECONDS} s"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return f"FAIL: {type(error).__name__} at {where}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    return "read"


def work(reader: str, first: int, last: int, folder: Path) -> None:
    """Run mutations in this process, with limited memory; print a line for each."""
    limit = GIGABYTES * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    for number in range(first, last):
        print(json.dumps({"start": number}), flush=True)
        result = attempt(reader, number, folder)
        print(json.dumps({"number": number, "result": result}), flush=True)


def _child(
    reader: str, first: int, last: int, folder: Path
) -> Iterator[tuple[int, str]]:
    """Yield the results of a child process; if it dies, the mutation that killed it fails."""
    work = ["--work", reader, str(first), str(last), str(folder)]
    command = [sys.executable, "-m", "benchmarks.fuzz", *work]
    done = subprocess.run(command, capture_output=True, text=True)
    started = first
    ended = first - 1
    for line in done.stdout.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            message = json.loads(line)
            started = message.get("start", started)
            if "result" in message:
                ended = message["number"]
                yield ended, message["result"]
    if ended < last - 1:
        tail = (done.stderr.strip().splitlines() or [""])[-1]
        yield started, f"FAIL: the process ended with {done.returncode}: {tail[:200]}"
        yield from (
            _child(reader, started + 1, last, folder) if started + 1 < last else ()
        )


def fuzz(
    reader: str, count: int, folder: Path, first: int = 0
) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run ``count`` mutations from number ``first``; return counts of results, and failures."""
    results: Counter[str] = Counter()
    failures = []
    end = first + count
    for start in range(first, end, CHUNK):
        for number, result in _child(reader, start, min(start + CHUNK, end), folder):
            results[result.partition(":")[0]] += 1
            if result.startswith("FAIL"):
                failures.append((number, result))
    return results, failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutations and report them; return 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=20_000, help="mutations of all readers"
    )
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first mutation"
    )
    parser.add_argument("--readers", nargs="+", choices=READERS, default=list(READERS))
    parser.add_argument(
        "--out", type=Path, help="append the JSON lines to this file as well"
    )
    parser.add_argument(
        "--only", help="repeat one mutation, as in load:17, and show its traceback"
    )
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.work:
        reader, first, last, folder = options.work
        work(reader, int(first), int(last), Path(folder))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        if options.only:
            READERS[options.only.partition(":")[0]](Random(options.only), folder)
            return 0
        return _report(options, folder)


def _report(options: argparse.Namespace, folder: Path) -> int:
    failed = 0
    with Reporter("fuzz_files", options.out, ("onnx", "onnxruntime")) as report:
        for reader in options.readers:
            count = options.count // len(options.readers)
            results, failures = fuzz(reader, count, folder, options.first)
            shown = [f"{reader}:{number} {reason}" for number, reason in failures[:20]]
            first = {"first": options.first} if options.first else {}
            report.value(reader=reader, **first, results=dict(results), failures=shown)
            failed += len(failures)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
