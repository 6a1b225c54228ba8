"""``torchq demo``: the way from a trained network to INT8 on real images, in about a minute."""

from __future__ import annotations

import copy
import json
import statistics
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
from torchq.cli.demo.data import (
    NETWORKS,
    Network,
    Split,
    accuracy,
    load_digits,
    predictions,
    train,
)
from torchq.errors import ExportError, MissingExtraError
from torchq.utils import markdown_table

_CALIBRATION_BATCHES = 5
#: Known architectures are timed on one image of this size, as they are used.
_TIMED_SIZE, _ROUNDS = 224, 7

#: What the demo says at its end.
_NEXT = """
open {report} to see which layers cost accuracy; then, for your own model:
  torchq quantize --model package.module:factory --data photos/ --export model.onnx
  torchq quantize --help"""


@dataclass(frozen=True)
class Row:
    """One line of the demo's table.

    Attributes:
        model: what it is.
        accuracy: on the test images.
        agreement: fraction of test images with the class that FP32 gives them.
        onnx_bytes: size of the ONNX file, or None.
        onnx_agreement: fraction of test images with the same class in PyTorch and in the ONNX graph
            as it is written, or None.
        runtime_agreement: the same with onnxruntime's optimisations, which round biases as well.
        milliseconds: for one image of 224 x 224 in PyTorch with one thread, or None.
    """

    model: str
    accuracy: float
    agreement: float
    onnx_bytes: int | None = None
    onnx_agreement: float | None = None
    runtime_agreement: float | None = None
    milliseconds: float | None = None


def run_demo(
    out: Path, *, seed: int = 0, epochs: int | None = None, model: str = "repvgg"
) -> list[Row]:
    """Train, fuse, quantize, fine-tune, export and verify a network, and print each step."""
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    network = NETWORKS[model]
    network = network if epochs is None else replace(network, epochs=epochs)
    data, test = (network.prepared(split) for split in load_digits(seed))
    sizes = f"{len(data.labels)} digits to train, {len(test.labels)} to test"
    print(f"torchq {torchq.__version__}, torch {torch.__version__}: {sizes}")
    net, rows = _fp32(network, data, test, out, seed)
    fp32 = predictions(net, test)
    rows += _int8(net, data, test, fp32, out, timed=network.size is not None)
    rows += _w4a4(network, net, data, test, fp32, out, seed)
    _report(net, data, test, out)
    text = table(rows)
    (out / "table.md").write_text(text + "\n")
    (out / "results.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    names = ", ".join(sorted(p.name for p in out.iterdir()))
    seconds = time.perf_counter() - started
    print(f"\n{text}\n\nwrote {names} to {out} in {seconds:.0f} s")
    print(_NEXT.format(report=out / "report.html"))
    return rows


def _fp32(
    network: Network, data: Split, test: Split, out: Path, seed: int
) -> tuple[nn.Module, list[Row]]:
    model = network.build()
    print(f"train {network.title} in FP32 for {network.epochs} epochs")
    optimizer = torch.optim.AdamW(model.parameters(), lr=network.lr, weight_decay=1e-3)
    train(model, data, optimizer, epochs=network.epochs, seed=seed)
    before = predictions(model, test)
    report = torchq.fuse_(model, data.images[:8])
    count = len(report.fused)
    print(f"fuse BatchNorms and branches into plain layers: {count} merges, every one verified")
    fp32 = predictions(model, test)
    fused = _exported("FP32, fused", model, fp32, test, fp32, out / "fp32.onnx")
    if network.size is not None:
        fused = replace(fused, milliseconds=_milliseconds(model))
    return model, [Row("FP32, as trained", accuracy(before, test), _same(before, fp32)), fused]


def _int8(
    model: nn.Module, data: Split, test: Split, fp32: Tensor, out: Path, *, timed: bool
) -> list[Row]:
    print("quantize to INT8: swap, calibrate, export; lower to integer kernels in PyTorch too")
    int8 = _quantized(model, torchq.recipes.int8(), data)
    torchq.save(int8, out / "int8.pt")
    # Integers, also where this machine computes them slower than floats: the table says so.
    engine = torchq.engines.TorchEngine(measured=False)
    deployed = torchq.deploy(int8, data.images[:8], engine=engine)
    integers = _row("INT8 in PyTorch", predictions(deployed, test), test, fp32)
    if timed:
        integers = replace(integers, milliseconds=_milliseconds(deployed))
    exported = _exported("INT8 PTQ", int8, predictions(int8, test), test, fp32, out / "int8.onnx")
    return [exported, integers]


@torch.no_grad()
def _milliseconds(model: nn.Module) -> float | None:
    """Return the median time for one image of the usual size; None where it takes no such one."""
    image = torch.randn(1, 3, _TIMED_SIZE, _TIMED_SIZE, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        samples = []
        for _ in range(_ROUNDS + 1):
            started = time.perf_counter()
            model(image)
            samples.append(1000 * (time.perf_counter() - started))
    except (AssertionError, RuntimeError):  # a transformer has positions for one size
        return None
    finally:
        torch.set_num_threads(threads)
    return statistics.median(samples[1:])


def _w4a4(
    network: Network,
    model: nn.Module,
    data: Split,
    test: Split,
    fp32: Tensor,
    out: Path,
    seed: int,
) -> list[Row]:
    print("quantize to W4A4", end="")
    w4a4 = _quantized(model, torchq.recipes.w4a4(), data)
    rows = [_row("W4A4 PTQ", predictions(w4a4, test), test, fp32)]
    if not network.fine_tuned:
        print(": torchq demo without --model also trains it (QAT)")
        return rows
    print(", then train it (QAT) to get back what that costs")
    optimizer = torch.optim.AdamW(torchq.qat.param_groups(w4a4, lr=1e-3, weight_decay=1e-4))
    train(w4a4, data, optimizer, epochs=network.epochs, seed=seed)
    rows.append(_exported("W4A4 QAT", w4a4, predictions(w4a4, test), test, fp32, out / "w4a4.onnx"))
    torchq.save(w4a4, out / "w4a4.pt")
    return rows


def _report(model: nn.Module, data: Split, test: Split, out: Path) -> None:
    """Write a report about the network in 4 bits before it is trained, which has much to show."""
    w4a4 = _quantized(model, torchq.recipes.w4a4(), data)

    def right(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (output.argmax(1) == batch[1]).float().mean()

    right.__name__ = "accuracy"
    try:
        torchq.report(w4a4, test.batches(200), out / "report.html", right)
        print("report on the W4A4 network before training: which layers hurt, and what to do")
    except MissingExtraError as error:
        print(f"no report.html: {error}")


def _quantized(model: nn.Module, config: torchq.QuantConfig, data: Split) -> nn.Module:
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, config)
    torchq.calibrate(quantized, data.batches(64)[:_CALIBRATION_BATCHES], progress=False)
    return quantized


def _same(a: Tensor, b: Tensor) -> float:
    return (a == b).float().mean().item()


def _row(name: str, predicted: Tensor, test: Split, fp32: Tensor) -> Row:
    return Row(name, accuracy(predicted, test), _same(predicted, fp32))


def _exported(
    name: str, model: nn.Module, predicted: Tensor, test: Split, fp32: Tensor, path: Path
) -> Row:
    """Return the row of a model that is also written as ONNX and run there."""
    row = _row(name, predicted, test, fp32)
    with warnings.catch_warnings():
        # The FP32 file is there to compare with.
        warnings.filterwarnings("ignore", message=".*no active quantizer")
        torchq.export_onnx(model, (test.images[:1],), path)
    report = torchq.verify_onnx(model, path, test.batches(200))
    if not report.ok:
        raise ExportError(f"{path.name}: does not compute what PyTorch does\n{report}")
    return replace(
        row,
        onnx_bytes=path.stat().st_size,
        onnx_agreement=report.outputs[0].top1,
        runtime_agreement=report.optimized[0].top1,
    )


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    head = ["model", "accuracy", "same class as FP32", "ONNX file", "ONNX = PyTorch", "optimised"]
    body = [_cells(row) for row in rows]
    if any(row.milliseconds is not None for row in rows):
        head.append(f"{_TIMED_SIZE} x {_TIMED_SIZE}, 1 thread")
        for row, cells in zip(rows, body, strict=True):
            cells.append("" if row.milliseconds is None else f"{row.milliseconds:.1f} ms")
    return markdown_table([head, *body])


def _cells(row: Row) -> list[str]:
    size = "" if row.onnx_bytes is None else f"{row.onnx_bytes / 1024:.0f} KiB"
    shares = [
        "" if share is None else f"{share:.2%}"
        for share in (row.onnx_agreement, row.runtime_agreement)
    ]
    return [row.model, f"{row.accuracy:.2%}", f"{row.agreement:.2%}", size, *shares]
