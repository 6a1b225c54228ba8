"""INT8 files in ONNX Runtime and OpenVINO: speed, and agreement with the simulation.

Speed: files of each ``--batch`` size, random weights with the statistics of BatchNorm taken from
random images. Every model is fused, quantized with ``target=`` and an example, calibrated and
exported; the float file is the fused model. The baseline of each ratio is the same runtime in
float32. The peer is the quantizer of the runtime's maker (onnxruntime.quantization, NNCF) on the
same float file and images, timed in the same rounds. Models of timm, named ``timm:NAME``, are left
out where timm is not installed; the learned factors of HGNetV2 and ConvNeXt are random, as 1 and 0
would be deleted. What is not quantized, OpenVINO computes in float32, but for the candidates in
bfloat16, its own default on CPUs that have it.

Each file is also run on the image of the example, and compared with the simulation in dB: by its
runtime, and unoptimised in ONNX Runtime. Beside it is what the simulation in float64 differs by,
which is rounding alone: these networks with random weights amplify every tie. ``--agree-only``
times nothing.

Agreement: a network trained on scikit-learn's digits, and with ``--data DIR`` (see
benchmarks/cifar.py) a trained CIFAR-10 ResNet-20, both calibrated on training images and run on
test images: the simulation against the file, unoptimised and optimised, and all codes.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from benchmarks.cifar import read_split, resnet20
from benchmarks.harness import Reporter, compare, parse, parser, timing
from benchmarks.untrained import vary_constants_
from benchmarks.vendors import VENDORS
from torchq.cli.demo.data import DemoNet, load_digits, train

MODELS = (
    *("resnet18", "resnet50", "mobilenet_v2", "encoder"),
    *("mobilenet_v3_small", "mobilenet_v3_large", "shufflenet_v2_x1_0", "efficientnet_b0"),
    *("timm:ghostnet_050", "timm:ghostnet_100", "timm:hgnetv2_b0", "timm:convnext_atto"),
    *("regnet_y_400mf", "resnext50_32x4d", "densenet121", "googlenet"),
    *("mnasnet1_0", "squeezenet1_1", "regnet_x_400mf", "alexnet", "vgg11", "inception_v3"),
    *("timm:mobilenetv4_conv_small", "timm:repvgg_a0"),
    *("timm:tf_efficientnet_b0", "timm:tf_mobilenetv3_small_100"),
    *("convnext_tiny", "vit_b_16", "swin_t"),
)
TRANSFORMERS = ("encoder", "vit_b_16", "swin_t")
TARGETS = ("onnxruntime", "openvino")
Call = Callable[[], object]


class EncoderBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.norm1(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        x = x + self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A fused float model in eval mode, and one input."""
    torch.manual_seed(0)
    if name == "encoder":
        blocks = (EncoderBlock(384, 6) for _ in range(4))
        return nn.Sequential(*blocks).eval(), torch.randn(1, 196, 384)
    if name.startswith("timm:"):
        import timm

        model = timm.create_model(name.removeprefix("timm:"), pretrained=False)
    else:
        import torchvision

        branched = name in ("googlenet", "inception_v3")
        options = {"init_weights": False, "aux_logits": False} if branched else {}
        model = getattr(torchvision.models, name)(**options)
    vary_constants_(model)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # a plain average of the batches below
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 224, 224))
    torchq.fuse_(model.eval())
    return model, torch.randn(1, 3, 224, 224)


def export_float(model: nn.Module, x: Tensor, path: Path) -> None:
    """Torch's own export of the float model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(path), dynamo=False, opset_version=20, input_names=["x"])


def quantized_for(target: str, model: nn.Module, x: Tensor) -> nn.Module:
    """A quantized and calibrated copy of the model, for a runtime."""
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, target=target, example=x)
    torchq.calibrate(quantized, [x, torch.randn_like(x)], progress=False)
    return quantized


def export_quantized(quantized: nn.Module, x: Tensor, path: Path, target: str) -> None:
    """Write a quantized model for a runtime, for inputs of the shape of ``x``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(
            quantized, x, path, target=target, dynamo=False, input_names=["x"], dynamic_batch=False
        )


def onnxruntime_call(path: Path, x: Tensor, threads: int) -> Call:
    """One inference in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feeds)


def openvino_call(path: Path, x: Tensor, threads: int, precision: str = "f32") -> Call:
    """One inference in OpenVINO; float32 stays float32 unless ``precision`` is bf16."""
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
    }
    core = openvino.Core()
    model = core.read_model(str(path))
    model.reshape(list(x.shape))
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    array = x.numpy()
    return lambda: request.infer([array])


RUNTIMES: dict[str, Callable[[Path, Tensor, int], Call]] = {
    "onnxruntime": onnxruntime_call,
    "openvino": openvino_call,
}


def speed(report: Reporter, name: str, target: str, options: argparse.Namespace) -> None:
    """Float against INT8, torchq's and the maker's, of one model in one runtime."""
    try:
        model, x = build(name)
        quantized = quantized_for(target, model, x)
        for batch in options.batch:
            images = x if batch == 1 else torch.randn(batch, *x.shape[1:])
            with tempfile.TemporaryDirectory() as folder:
                compare_files(report, name, target, (model, quantized), images, folder, options)
    except ImportError as error:
        report.value(model=name, runtime=target, skipped=str(error))


def compare_files(
    report: Reporter,
    name: str,
    target: str,
    models: tuple[nn.Module, nn.Module],
    x: Tensor,
    folder: str,
    options: argparse.Namespace,
) -> None:
    """Report the time and agreement of a float and a quantized model for one input."""
    (model, quantized), run = models, RUNTIMES[target]
    plain, integer = Path(folder, "float.onnx"), Path(folder, "int8.onnx")
    export_float(model, x, plain)
    export_quantized(quantized, x, integer, target)
    calls = {"float32": run(plain, x, options.threads), "int8": run(integer, x, options.threads)}
    case = {"model": name, "runtime": target, "batch": len(x)}
    if len(x) == 1:
        found = agreement_db(model, quantized, x, first_result(calls["int8"]()), integer)
        report.value(**case, agreement_db=found, **contents(plain, integer))
    if options.agree_only:
        return
    half = target == "openvino"
    if half:
        calls["bfloat16"] = openvino_call(plain, x, options.threads, "bf16")
        calls["int8, bfloat16"] = openvino_call(integer, x, options.threads, "bf16")
    quantize, suffix = VENDORS[target]
    peer = Path(folder, "peer").with_suffix(suffix)
    try:
        seen = [x, torch.randn_like(x)][: 2 if len(x) == 1 else 1]
        maker = quantize(plain, peer, seen, name in TRANSFORMERS)
        calls[maker] = run(peer, x, options.threads)
        if half:
            calls[f"{maker}, bfloat16"] = openvino_call(peer, x, options.threads, "bf16")
    except ImportError as error:
        report.value(**case, skipped=str(error))
    clock = time.process_time if options.cpu_time else time.perf_counter
    for row in compare(calls, baseline="float32", clock=clock, **timing(options)):
        report.timing(row, **case, threads=options.threads, clock=clock.__name__)


def first_result(outputs: Any) -> Tensor:
    """Return the first output of a runtime, which are a list, or a mapping in OpenVINO."""
    values = outputs if isinstance(outputs, list) else list(outputs.values())
    return torch.from_numpy(values[0].copy())


def agreement_db(
    model: nn.Module, quantized: nn.Module, x: Tensor, got: Tensor, path: Path
) -> dict[str, float]:
    """Return how far results are from the simulation, and that from float, in dB."""
    with torch.no_grad():
        simulated, exact = quantized.eval()(x), model(x)
    return {
        "runtime": decibels(got, simulated),
        "unoptimised file": decibels(first_result(unoptimised(path, x)), simulated),
        "simulation in float64": rounding_alone(quantized, [x])["sqnr_db"],
        "float": decibels(exact, simulated),
    }


def unoptimised(path: Path, x: Tensor) -> Any:
    """Run a file as it is written, in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})


def decibels(got: Tensor, expected: Tensor) -> float:
    """Return the ratio of the expected values to the error; 200 for equal ones."""
    error = (got.double() - expected.double()).square().sum()
    signal = expected.double().square().sum()
    return round(float(10 * torch.log10(signal / error)), 1) if error else 200.0


def contents(plain: Path, integer: Path) -> dict[str, object]:
    """Return the sizes of both files, and the operators that ONNX Runtime takes as integer ones."""
    nodes = torchq.inspect_onnx(integer)
    return {
        "bytes_float32": plain.stat().st_size,
        "bytes_int8": integer.stat().st_size,
        "onnxruntime_integer": dict(Counter(node.kind for node in nodes.integer)),
        "onnxruntime_float": dict(Counter(node.kind for node in nodes.fallbacks)),
    }


def digits_case() -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A network trained on digits, its training and its test images in batches."""
    data, test = load_digits()
    torch.manual_seed(0)
    model = DemoNet()
    train(model, data, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3), epochs=12)
    return (
        model,
        [images for images, _ in data.batches(200)],
        [images for images, _ in test.batches(200)],
    )


def cifar_case(folder: Path, count: int) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """The trained ResNet-20, some training images and ``count`` test images in batches."""
    return (
        resnet20(folder),
        read_split(folder, "train", 512).batches(128),
        read_split(folder, "test", count).batches(250),
    )


def rounding_alone(model: nn.Module, batches: list[Tensor]) -> dict[str, float]:
    """Return how well the simulation in float32 agrees with itself in float64.

    This is what rounding alone changes, whatever the runtime.
    """
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        pairs = [(model.eval()(x).double(), exact(x.double())) for x in batches]
    got, expected = (torch.cat(side) for side in zip(*pairs, strict=True))
    same = (got.argmax(1) == expected.argmax(1)).double().mean()
    error = (got - expected).square().sum() / expected.square().sum()
    return {"top1": float(same), "sqnr_db": float(-10 * error.log10())}


def agreement(
    report: Reporter,
    name: str,
    target: str | None,
    data: tuple[nn.Module, list[Tensor], list[Tensor]],
) -> None:
    """Compare the simulation of a trained network with its file, on test images."""
    model, seen, test = copy.deepcopy(data[0]), data[1], data[2]
    torchq.fuse_(model)
    torchq.quantize_(model, target=target, example=seen[0][:1])
    torchq.calibrate(model, seen, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "int8.onnx")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torchq.export_onnx(model, seen[0][:1], path, target=target, dynamo=False)
        found = torchq.verify_onnx(model, path, test)
    case: dict[str, Any] = {"model": name, "target": target, "images": sum(map(len, test))}
    for how, outputs in (("unoptimised", found.outputs), ("optimised", found.optimized)):
        figures = outputs[0]
        report.value(
            **case, runs=how, top1=figures.top1, sqnr_db=figures.sqnr_db, max_diff=figures.max_diff
        )
    control = rounding_alone(model, test)
    report.value(**case, runs="simulation in float64", **control)
    codes = sum(layer.elements for layer in found.layers)
    ties, wrong = (
        sum(layer.ties for layer in found.layers),
        sum(layer.mismatches for layer in found.layers),
    )
    report.value(
        **case,
        runs="layer by layer",
        quantizers=len(found.layers),
        codes=codes,
        ties=ties,
        wrong=wrong,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _options(argv)
    with Reporter(
        "deploy_onnx", options.out, ["onnx", "onnxruntime", "openvino", "nncf"]
    ) as report:
        for name in options.models:
            for target in options.runtimes:
                speed(report, name, target, options)
        cases = {"digits": digits_case} | (
            {}
            if options.data is None
            else {"resnet20": lambda: cifar_case(options.data, options.images)}
        )
        for name in options.agreement:
            if name not in cases:
                continue
            data = cases[name]()
            for target in (None, *options.runtimes):
                agreement(report, name, target, data)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    arguments.add_argument("--runtimes", nargs="*", default=list(TARGETS), choices=TARGETS)
    arguments.add_argument("--batch", nargs="+", type=int, default=[1], help="images in a file")
    arguments.add_argument(
        "--data",
        type=Path,
        help="folder with CIFAR-10 and resnet20.pt: measures agreement on them too",
    )
    arguments.add_argument(
        "--images", type=int, default=10000, help="test images (default: %(default)s)"
    )
    arguments.add_argument(
        "--agreement",
        nargs="*",
        default=["digits", "resnet20"],
        choices=("digits", "resnet20"),
        help="data to compare on",
    )
    arguments.add_argument(
        "--agree-only", action="store_true", help="compare results, and time nothing"
    )
    arguments.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure processor time, with one thread: other programs then count little",
    )
    return parse(arguments, argv)


if __name__ == "__main__":
    main()
