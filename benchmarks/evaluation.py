"""Does evaluation return what a default session of ONNX Runtime returns, and what does it cost?

For networks x recipes: the share of images whose outputs are those of the session to the last bit,
and to 1e-4 of the largest output, with the model as users have it: quantized for onnxruntime,
calibrated, in eval mode, without gradients. A network of which the session computes something in
float, such as a softmax or a last convolution, cannot be equal for certain: the row says what.
``--target executorch`` and ``--target torch`` compare networks with what these run in the same way.

The time is that of a forward over the fused float model, on the same batches, in turns. ``--data``
has the trained weights of two networks. The others have random weights, and statistics of norms of
the images: see :func:`settle_`.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from benchmarks.cifar import read_split, repvgg_cifar, resnet20
from benchmarks.harness import Reporter, compare, finished_rows, parse, parser
from benchmarks.zoo_models import build
from torchq.graph import tensors_in
from torchq.lowering.layer import Int8Layer
from torchq.onnx.ir import load_model
from torchq.runtime import open_session
from torchq.utils.text import table

_KEY = ("network", "recipe", "images")
_CLOSE = 1e-4
#: Operators that give the same bits in every library, and what multiplies integers.
_SAME_OPERATORS = """
QuantizeLinear DequantizeLinear MatMulIntegerToFloat Add Sub Mul Div Neg Abs Max Min Relu Clip
MaxPool ReduceMax LeakyRelu Reshape Transpose Flatten Squeeze Unsqueeze Concat Slice Gather Split
Shape Expand Pad Identity Cast Constant ConstantOfShape Where Equal Range Floor
"""
_SAME_EVERYWHERE = frozenset(_SAME_OPERATORS.split())
_NEAR_ZERO = 1e-5
_SPREAD = 0.05
#: The networks that are compared with files of ExecuTorch.
IN_FILES = (
    *("resnet20", "resnet18", "squeezenet1_1", "mobilenet_v2", "googlenet"),
    *("regnet_x_400mf", "unet", "mobilenet_v3_small", "vgg11"),
)
#: The networks with trained weights.
TRAINED = ("resnet20", "repvgg")


RECIPES: dict[str, Callable[[], torchq.QuantConfig]] = {
    "int8": torchq.recipes.int8,
    "asymmetric": lambda: torchq.recipes.int8(symmetric=False),
    "w4a4": lambda: torchq.recipes.integer(4, 4),
}
TORCHVISION = """
resnet18 mobilenet_v3_small squeezenet1_1 shufflenet_v2_x0_5 mobilenet_v2 efficientnet_b0 googlenet
densenet121 regnet_x_400mf regnet_y_400mf mnasnet0_5 mobilenet_v3_large vit_b_32 convnext_tiny
lraspp_mobilenet_v3_large
"""


class Recurrent(nn.Module):
    """A convolution over the rows of an image, an LSTM over its columns, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.lstm = nn.LSTM(256, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, 32, W) to (N, 10)."""
        x = self.conv(x).relu().permute(0, 3, 1, 2).flatten(2)
        return self.head(self.lstm(x)[0][:, -1])


def vgg11() -> nn.Module:
    """Return torchvision's VGG-11 with norms, and one layer for a head, for small images."""
    model = build("torchvision/vgg11_bn").model
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Linear(512, 10)
    return model.eval()


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    """A U-Net of two levels with transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _pair(3, 16)
        self.second = _pair(16, 32)
        self.last = _pair(32, 16)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to (N, 4, H, W)."""
        x = self.first(x)
        low = self.second(F.max_pool2d(x, 2))
        return self.head(self.last(torch.cat([x, self.up(low)], 1)))


class Detector(nn.Module):
    """Features of two sizes with the boxes and classes of a single-shot detector."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.deeper = _pair(3, 16), _pair(16, 32)
        self.boxes = nn.ModuleList([nn.Conv2d(c, 8, 3, padding=1) for c in (16, 32)])
        self.classes = nn.ModuleList([nn.Conv2d(c, 10, 3, padding=1) for c in (16, 32)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (N, 3, H, W) to boxes (N, anchors, 4) and classes (N, anchors, 5)."""
        first = F.max_pool2d(self.body(x), 4)
        levels = (first, F.max_pool2d(self.deeper(first), 2))
        boxes = [head(level) for head, level in zip(self.boxes, levels, strict=True)]
        scores = [head(level) for head, level in zip(self.classes, levels, strict=True)]
        return _anchors(boxes, 4), _anchors(scores, 5).sigmoid()


def _anchors(levels: list[Tensor], size: int) -> Tensor:
    rows = [
        level.permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, size))
        for level in levels
    ]
    return torch.cat(rows, 1)


def networks(data: Path | None) -> Iterator[tuple[str, Callable[[], nn.Module], int]]:
    """Yield name, maker and image size of each network."""
    yield "resnet20", lambda: resnet20(data), 32
    if data is not None:
        yield "repvgg", lambda: repvgg_cifar(data), 32
    for name in TORCHVISION.split():
        yield name, lambda name=name: build(f"torchvision/{name}").model, 64
    yield "vgg11", vgg11, 32
    for cls in (Recurrent, UNet, Detector):
        yield cls.__name__.lower(), lambda cls=cls: cls().eval(), 32


def images(
    data: Path | None, size: int, count: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return batches to calibrate with, and others to compare on."""
    torch.manual_seed(0)
    splits = [torch.randn(count, 3, 32, 32) for _ in range(2)]
    if data is not None:
        splits = [read_split(data, split, count).images for split in ("train", "test")]
    first, second = (
        list(F.interpolate(x, size=(size, size)).split(16)) for x in splits
    )
    return first, second


@torch.no_grad()
def settle_(model: nn.Module, batches: list[Tensor]) -> None:
    """Give a network with random weights outputs that tell images apart, in place.

    Statistics of norms are those of the images; without them what each layer adds dies out, and
    any two images have one output. What authors begin with 0, or near it, is drawn.

    Raises:
        RuntimeError: Outputs are equal all the same, so that equal ones would prove nothing.
    """
    norms = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for batch in batches:
        model(batch)
    for norm in norms:
        norm.eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and float(parameter.abs().max()) < _NEAR_ZERO:
            parameter.normal_(std=0.1)
    for result in tensors_in(model(batches[0])):
        spread = (result - result[:1]).abs().amax()
        if float(spread) < _SPREAD * float(result.abs().max()):
            raise RuntimeError("evaluation: all images have one output")


@torch.no_grad()
def figures(
    model: nn.Module, recipe: str, data: tuple[list[Tensor], list[Tensor]], rounds: int
) -> dict[str, Any]:
    """Return the shares of equal images, the time over float, and what runs in float.

    Args:
        model: float and fused; it is left as it is.
        recipe: one of :data:`RECIPES`.
        data: batches to calibrate with, and others to compare on.
        rounds: samples of the time.
    """
    calibration, test = data
    example = calibration[0][:2]
    quantized = _calibrated(model, recipe, "onnxruntime", calibration, example)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torchq.export_onnx(quantized, example, path, dynamo=False, progress=False)
        optimized = Path(folder, "optimized.onnx")
        session = open_session(path, optimize=True, save_optimized=optimized)
        islands = _islands(optimized)
    shares = _shares(
        quantized, lambda batch: session.run(session.feeds({"x": batch})), test
    )
    ratio = _time_over(model, quantized, test[0], rounds)
    return {**shares, "time": ratio, "islands": islands}


@torch.no_grad()
def file_figures(
    model: nn.Module,
    target: str,
    data: tuple[list[Tensor], list[Tensor]],
    rounds: int,
) -> dict[str, Any]:
    """Return the same of a target whose files have the size of one batch.

    ``layers`` counts those whose results are codes, ``outside`` what XNNPACK does not compute.
    """
    calibration, test = data
    quantized = _calibrated(model, "int8", target, calibration, test[0])
    file = torchq.deploy(quantized, test[0], target=target, progress=False)
    shares = _shares(quantized, lambda batch: list(tensors_in(file(batch))), test)
    ratio = _time_over(model, quantized, test[0], rounds)
    kernels = [m for m in file.modules() if isinstance(m, Int8Layer)]
    counts = sum(m.output_qparams is not None for m in kernels), len(kernels)
    outside: set[str] = set()
    if not kernels:
        report: Any = file.report
        counts = len(report.integer), len(report.integer) + len(report.in_float)
        outside = {name.split()[0] for name in report.outside}
    return {
        **shares,
        "time": ratio,
        "layers": f"{counts[0]} of {counts[1]}",
        "outside": ", ".join(sorted(outside)),
    }


def _calibrated(
    model: nn.Module,
    recipe: str,
    target: str,
    batches: list[Tensor],
    example: Tensor,
) -> nn.Module:
    quantized = copy.deepcopy(model)
    config = RECIPES[recipe]()
    torchq.quantize_(quantized, config, target=target, example=example, progress=False)
    torchq.calibrate(quantized, batches, progress=False)
    return quantized


def _shares(
    quantized: nn.Module,
    runtime: Callable[[Tensor], Sequence[Tensor]],
    batches: list[Tensor],
) -> dict[str, float]:
    """Return the shares of images whose outputs are those of the runtime."""
    equal: list[Tensor] = []
    close: list[Tensor] = []
    for batch in batches:
        outputs = list(tensors_in(quantized(batch)))
        expected = runtime(batch)
        equal.append(_alike(outputs, expected, 0.0))
        close.append(_alike(outputs, expected, _CLOSE))
    return {
        "equal": torch.cat(equal).double().mean().item(),
        "close": torch.cat(close).double().mean().item(),
    }


def _time_over(
    model: nn.Module, quantized: nn.Module, batch: Tensor, rounds: int
) -> float:
    """Return the time of a quantized forward over that of the float model."""
    candidates = {"float": lambda: model(batch), "quantized": lambda: quantized(batch)}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    _, timing = compare(
        candidates, baseline="float", rounds=rounds, warmup=2, clock=clock
    )
    return round(timing.ratio, 2)


def _islands(path: Path) -> str:
    """Return the operators of an optimised file whose float results depend on the library.

    Two libraries add in other orders there, or approximate a function in another way. Single
    additions and products of floats, and what moves or compares values, are the same in both.
    """
    kinds = {node.op_type for node in load_model(path, check=False).graph}
    float_kinds = {kind for kind in kinds if not kind.startswith(("QLinear", "QGemm"))}
    return ", ".join(sorted(float_kinds - _SAME_EVERYWHERE))


def _alike(
    found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> Tensor:
    """Return for each image if its outputs differ by no more than a share of the largest one."""
    are_alike = torch.ones(len(found[0]), dtype=torch.bool)
    for tensor, from_session in zip(found, expected, strict=True):
        allowed = tolerance * from_session.abs().max()
        are_alike &= ((tensor - from_session).abs() <= allowed).flatten(1).all(1)
    return are_alike


def compare_files(options: argparse.Namespace) -> None:
    """Compare networks with the files of another target, and print one table."""
    bench = f"evaluation_{options.target}"
    chosen = options.networks or IN_FILES
    done = finished_rows(options.out, "network")
    rows: list[list[Any]] = []
    packages = [options.target] if options.target != "torch" else []
    with Reporter(bench, options.out, packages) as report:
        for name, make, size in networks(options.data):
            if name not in chosen or (name,) in done:
                continue
            data = images(options.data, size, options.images)
            model = make()
            if name not in TRAINED or options.data is None:
                settle_(model, data[0])
            torchq.fuse_(model, data[0][0][:2])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                row = file_figures(model, options.target, data, options.rounds)
            report.value(network=name, images=options.images, **row)
            rows.append([name, *map(str, row.values())])
    heading = ("network", "equal", "close", "time", "layers", "outside")
    print(table([heading, *rows]))


def main(argv: Sequence[str] | None = None) -> None:
    """Compare every network that ``--networks`` names, and print one table."""
    command = parser(__doc__)
    command.add_argument(
        "--data", type=Path, help="folder of the images and trained weights"
    )
    command.add_argument("--images", type=int, default=64, help="images to compare on")
    command.add_argument("--networks", nargs="*", help="these alone; default all")
    command.add_argument("--recipes", nargs="*", default=list(RECIPES))
    command.add_argument(
        "--target",
        default="onnxruntime",
        choices=("onnxruntime", "executorch", "torch"),
    )
    options = parse(command, argv)
    if options.target != "onnxruntime":
        compare_files(options)
        return
    done = finished_rows(options.out, *_KEY)
    rows: list[list[Any]] = []
    with Reporter("evaluation", options.out, ["onnx", "onnxruntime"]) as report:
        for name, make, size in networks(options.data):
            recipes = [
                r for r in options.recipes if (name, r, options.images) not in done
            ]
            if (options.networks and name not in options.networks) or not recipes:
                continue
            data = images(options.data, size, options.images)
            model = make()
            if name not in TRAINED or options.data is None:
                settle_(model, data[0])
            torchq.fuse_(model, data[0][0][:2])
            for recipe in recipes:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    row = figures(model, recipe, data, options.rounds)
                report.value(network=name, recipe=recipe, images=options.images, **row)
                rows.append([name, recipe, *map(str, row.values())])
    heading = ("network", "recipe", "equal", "close", "time", "in float")
    print(table([heading, *rows]))


if __name__ == "__main__":
    main()
