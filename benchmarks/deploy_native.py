"""Whole networks: ``torchq.deploy`` against FP32 (eager and compiled), BF16, and INT8 of ONNX Runtime and OpenVINO.

All run the same calibrated network (random weights; BatchNorm is folded first for every candidate but the FP32 baseline). The
baseline is FP32 eager as a user would run it: the model as built, in eval mode, without gradients. Peers that are not installed are
left out. ``agreement_db`` is the signal to error ratio of the deployed model against its simulation on the timed input.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
from benchmarks.harness import Reporter, compare, parse, parser, timing

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "encoder")
Candidates = dict[str, Callable[[], object]]


class Encoder(nn.Module):
    """Four pre-norm transformer blocks of width 384 on 196 tokens."""

    def __init__(self, width: int = 384, heads: int = 6, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


def build(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    """The network with plausible BatchNorm statistics, and an input."""
    torch.manual_seed(0)
    if name == "encoder":
        return Encoder().eval(), torch.randn(batch, 196, 384)
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 3, 224, 224))
    return model.eval(), torch.randn(batch, 3, 224, 224)


def quantized(model: nn.Module, x: Tensor, target: str | None = None) -> nn.Module:
    """Folded, quantized and calibrated on the timed input."""
    result = copy.deepcopy(model)
    torchq.fuse_(result, x[:1], verify=False)
    torchq.quantize_(result, target=target)
    torchq.calibrate(result, [x[:4]], progress=False)
    return result


def onnxruntime_call(path: Path, x: Tensor, threads: int) -> Callable[[], object]:
    """ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def openvino_call(path: Path, x: Tensor, threads: int) -> Callable[[], object]:
    """OpenVINO on the CPU, for latency."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    request = compiled.create_infer_request()
    data = x.numpy()
    return lambda: request.infer([data])


def candidates(model: nn.Module, x: Tensor, options: object, folder: Path) -> tuple[Candidates, float]:
    """Name -> call, and the agreement of the deployed model in dB."""
    simulated = quantized(model, x)
    int8 = torchq.deploy(simulated)
    error = (int8(x) - simulated(x)).double().square().sum()
    agreement = float(10 * torch.log10(simulated(x).double().square().sum() / error)) if error else float("inf")
    folded = torchq.restore_(copy.deepcopy(simulated))
    half, half_x = copy.deepcopy(folded).to(torch.bfloat16), x.to(torch.bfloat16)
    if x.dim() == 4:
        half, half_x = half.to(memory_format=torch.channels_last), half_x.contiguous(memory_format=torch.channels_last)
    found: Candidates = {
        "fp32 eager": lambda: model(x),
        "fp32 folded": lambda: folded(x),
        "bf16 folded": lambda: half(half_x),
        "int8": lambda: int8(x),
        "int8 layers only": (lambda layers: lambda: layers(x))(torchq.deploy(simulated, chains=False)),
    }
    if x.dim() == 4:  # with quantized shortcuts, which is where TensorRT wants them and oneDNN too
        found["int8 residual"] = (lambda chained: lambda: chained(x))(torchq.deploy(quantized(model, x, "tensorrt")))
    if options.compiled:
        found["fp32 compiled"] = (lambda compiled: lambda: compiled(x))(torch.compile(folded))
        found["int8 compiled"] = (lambda compiled: lambda: compiled(x))(torch.compile(int8))
    if options.peers:
        for peer, call, target in (("onnxruntime", onnxruntime_call, "onnxruntime"), ("openvino", openvino_call, "openvino")):
            with suppress(ImportError):
                path = folder / f"{peer}.onnx"
                torchq.export_onnx(simulated, (x,), path, target=target)
                found[f"int8 {peer}"] = call(path, x, options.threads)
    return found, agreement


def main(argv: Sequence[str] | None = None) -> None:
    """Run and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    arguments.add_argument("--batch", nargs="+", type=int, default=[1])
    arguments.add_argument("--compiled", action="store_true", help="torch.compile as well (needs a C++ compiler, takes minutes)")
    arguments.add_argument("--peers", action="store_true", help="ONNX Runtime and OpenVINO as well, where installed")
    options = parse(arguments, argv)
    with Reporter("deploy_native", options.out, packages=("onnxruntime", "openvino")) as report, torch.no_grad():
        for name in options.models:
            for batch in options.batch:
                model, x = build(name, batch)
                with tempfile.TemporaryDirectory() as folder:
                    start = time.perf_counter()
                    found, agreement = candidates(model, x, options, Path(folder))
                    report.value(model=name, batch=batch, agreement_db=agreement, setup_s=time.perf_counter() - start)
                    for row in compare(found, baseline="fp32 eager", **timing(options)):
                        report.timing(row, model=name, batch=batch, threads=options.threads, speedup=1 / row.ratio)


if __name__ == "__main__":
    main()
