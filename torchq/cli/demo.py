"""``torchq demo``: the way from a trained network to INT8 on real images, in about a minute."""

import argparse
import copy
import json
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.errors import ExportError, MissingExtraError
from torchq.lowering.kernel import saturates
from torchq.runtime import reference_runtime
from torchq.utils import markdown_table, progress_bar

_CALIBRATION_BATCHES = 5

#: What the demo says at its end.
_NEXT = """
open {report} to see which layers cost accuracy; then, for your own model:
  torchq quantize --model package.module:factory --data photos/ --export model.onnx
  torchq quantize --help"""


@dataclass(frozen=True)
class Split:
    """Images (N, 1, 8, 8) float32 in 0..1, and labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Return batches in order; the last one may be smaller."""
        return list(zip(self.images.split(size), self.labels.split(size), strict=True))


def load_digits(seed: int = 0) -> tuple[Split, Split]:
    """Return 1797 scanned digits of 8x8 pixels, shuffled: 1200 to train and 597 to test.

    Source: UCI ML repository, Alpaydin and Kaynak (1998).
    """
    try:
        from sklearn.datasets import load_digits as read  # noqa: PLC0415
    except ImportError:
        raise MissingExtraError(
            "torchq demo needs scikit-learn, which is not installed. Run pip install 'torchq[demo]'"
        ) from None
    digits = read()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    first = order[:1200]
    test_rows = order[1200:]
    return Split(images[first], labels[first]), Split(
        images[test_rows], labels[test_rows]
    )


class ConvBN(nn.Sequential):
    """A convolution and its BatchNorm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)


class RepVGGBlock(nn.Module):
    """Three parallel branches in training, one 3x3 convolution after :func:`torchq.fuse_`.

    Reference: Ding et al., RepVGG: Making VGG-style ConvNets Great Again (CVPR 2021), figure 4.
    """

    rbr_reparam: nn.Module

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.rbr_dense = ConvBN(inputs, outputs, 3, stride)
        self.rbr_1x1 = ConvBN(inputs, outputs, 1, stride)
        self.rbr_identity = (
            nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None
        )
        self.nonlinearity = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the branches that are there, after ReLU."""
        if hasattr(self, "rbr_reparam"):
            return self.nonlinearity(self.rbr_reparam(x))
        identity = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.nonlinearity(self.rbr_dense(x) + self.rbr_1x1(x) + identity)


class DemoNet(nn.Sequential):
    """Nine RepVGG blocks in three stages, global average pooling and a linear layer.

    Shape: (N, 1, 8, 8) -> (N, 10) logits.
    """

    def __init__(self, width: int = 16) -> None:
        blocks = []
        inputs = 1
        for stage in range(3):
            outputs = width * 2**stage
            for block in range(3):
                blocks.append(
                    RepVGGBlock(inputs, outputs, stride=2 if stage and not block else 1)
                )
                inputs = outputs
        super().__init__(
            *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)
        )


def train(
    model: nn.Module,
    data: Split,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    seed: int = 0,
    size: int = 64,
) -> None:
    """Train with cross entropy and a cosine schedule behind a bar; leave it in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(data.labels) // size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in progress_bar(range(epochs), description="train", unit="epoch"):
        for index in torch.randperm(len(data.labels), generator=generator).split(size):
            loss = F.cross_entropy(model(data.images[index]), data.labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


@dataclass(frozen=True)
class Row:
    """One line of the demo's table; agreement is the share of test images of the same class."""

    model: str
    accuracy: float  # on the test images
    agreement: float  # with FP32
    onnx_bytes: int | None = None
    onnx_agreement: float | None = None  # of PyTorch with ONNX Runtime

    def cells(self) -> list[str]:
        """Return the row as text for the table."""
        size = "" if self.onnx_bytes is None else f"{self.onnx_bytes / 1024:.0f} KiB"
        share = "" if self.onnx_agreement is None else f"{self.onnx_agreement:.2%}"
        return [
            self.model,
            f"{self.accuracy:.2%}",
            f"{self.agreement:.2%}",
            size,
            share,
        ]


def run_demo(args: argparse.Namespace) -> int:
    """Train, fuse, quantize, round, fine-tune, export and verify a network, and print each step."""
    started = time.perf_counter()
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    data, test = load_digits(args.seed)
    sizes = f"{len(data.labels)} digits to train, {len(test.labels)} to test"
    print(f"torchq {torchq.__version__}, torch {torch.__version__}: {sizes}")
    demo = _Demo(data, test, out, args.seed, args.epochs)
    net, before = demo.fp32()
    demo.int8(net)
    demo.w4a4(net)
    demo.report(net)
    rows = [demo.row("FP32, as trained", before), *demo.rows]
    head = ["model", "accuracy", "same class as FP32", "ONNX file", "ONNX = PyTorch"]
    table = markdown_table([head, *(row.cells() for row in rows)])
    (out / "table.md").write_text(table + "\n")
    (out / "results.json").write_text(
        json.dumps([asdict(row) for row in rows], indent=2) + "\n"
    )
    names = ", ".join(sorted(p.name for p in out.iterdir()))
    seconds = time.perf_counter() - started
    print(f"\n{table}\n\nwrote {names} to {out} in {seconds:.0f} s")
    print(_NEXT.format(report=out / "report.html"))
    return 0


def accuracy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the share of right classes."""
    return (output.argmax(1) == batch[1]).float().mean()


def _w4a4() -> torchq.QuantConfig:
    """Return the recipe with ends of 8 bits, or of 7 where kernels of the CPU overflow with 8."""
    return torchq.recipes.w4a4(first_last=7 if saturates() else 8)


@dataclass
class _Demo:
    """The steps of the demo: the data, the folder, and the rows so far."""

    data: Split
    test: Split
    out: Path
    seed: int
    epochs: int
    rows: list[Row] = field(default_factory=list)
    wanted: Tensor = field(init=False)  # the classes that the float network gives

    def fp32(self) -> tuple[nn.Module, Tensor]:
        """Return the trained and fused network, and the classes that it gave before."""
        model = DemoNet()
        print(f"train a small RepVGG in FP32 for {self.epochs} epochs")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
        train(model, self.data, optimizer, epochs=self.epochs, seed=self.seed)
        before = self.classes(model)
        count = len(torchq.fuse_(model, self.data.images[:8]).fused)
        print(
            f"fuse BatchNorms and branches into plain layers: {count} merges, every one verified"
        )
        self.wanted = self.classes(model)
        self.export("FP32, fused", model, "fp32.onnx")
        return model, before

    def int8(self, net: nn.Module) -> None:
        print(
            "quantize to INT8: swap, calibrate, export; lower to integer kernels in PyTorch too"
        )
        int8 = self.quantized(net, torchq.recipes.int8(reduce_range=saturates()))
        torchq.save(int8, self.out / "int8.pt")
        deployed = torchq.deploy(int8, self.data.images[:8], target="torch")
        print(torchq.runtimes.speed(int8, self.data.images[:8]))
        self.export("INT8 PTQ", int8, "int8.onnx")
        self.rows.append(self.row("INT8 in PyTorch", self.classes(deployed)))

    def w4a4(self, net: nn.Module) -> None:
        print(
            "quantize to W4A4; gptq_ gets back what that costs in seconds, training (QAT) the rest"
        )
        w4a4 = self.quantized(net, _w4a4())
        self.rows.append(self.row("W4A4 PTQ", self.classes(w4a4)))
        rounded = copy.deepcopy(w4a4)
        torchq.ptq.gptq_(rounded, self.calibration, progress=False)
        self.rows.append(self.row("W4A4 gptq_", self.classes(rounded)))
        optimizer = torch.optim.AdamW(
            torchq.qat.param_groups(w4a4, lr=1e-3, weight_decay=1e-4)
        )
        train(w4a4, self.data, optimizer, epochs=self.epochs, seed=self.seed)
        self.export("W4A4 QAT", w4a4, "w4a4.onnx")
        torchq.save(w4a4, self.out / "w4a4.pt")

    def report(self, net: nn.Module) -> None:
        """Write a report about the network in 4 bits as calibrated: much to show."""
        w4a4 = self.quantized(net, _w4a4())
        try:
            torchq.report(
                w4a4, self.test.batches(200), self.out / "report.html", accuracy
            )
            print(
                "report on the W4A4 network as calibrated: which layers hurt, what helps first"
            )
        except MissingExtraError as error:
            print(f"no report.html: {error}")

    def quantized(self, model: nn.Module, config: torchq.QuantConfig) -> nn.Module:
        quantized = copy.deepcopy(model)
        example = self.data.images[:1]
        torchq.quantize_(quantized, config, target=reference_runtime(), example=example)
        torchq.calibrate(quantized, self.calibration, progress=False)
        return quantized

    @property
    def calibration(self) -> list[tuple[Tensor, Tensor]]:
        return self.data.batches(64)[:_CALIBRATION_BATCHES]

    @torch.no_grad()
    def classes(self, model: nn.Module) -> Tensor:
        """Return the class of each test image, (N,)."""
        return torch.cat(
            [model(images).argmax(1) for images, _ in self.test.batches(200)]
        )

    def row(self, name: str, found: Tensor) -> Row:
        right = found == self.test.labels
        same = found == self.wanted
        return Row(name, right.float().mean().item(), same.float().mean().item())

    def export(self, name: str, model: nn.Module, file: str) -> None:
        """Add the row of a model that is also written as ONNX and run there."""
        path = self.out / file
        with warnings.catch_warnings():
            # The FP32 file is there to compare with.
            warnings.filterwarnings("ignore", message=".*no active quantizer")
            torchq.export_onnx(model, (self.test.images[:1],), path)
        report = torchq.verify_onnx(model, path, self.test.batches(200))
        if not report.ok:
            raise ExportError(
                f"{path.name}: does not compute what PyTorch does\n{report}"
            )
        plain = self.row(name, self.classes(model))
        top1 = report.outputs[0].top1
        self.rows.append(
            Row(name, plain.accuracy, plain.agreement, path.stat().st_size, top1)
        )
