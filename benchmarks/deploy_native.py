"""Time ``torchq.deploy`` on whole networks, beside FP32, BF16, and INT8 of other runtimes.

All candidates run the same calibrated network with random weights. BatchNorm is folded first for
every candidate but the baseline, which is FP32 eager as a user would run it: the model as built,
in eval mode, without gradients. ONNX Runtime and OpenVINO are left out where they are not
installed. Every network is also compared with its simulation, and its memory is counted.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.harness import Reporter, compare, parse, parser, timing

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "encoder", "vit_b_16", "unet")
Candidates = dict[str, Callable[[], object]]


class Encoder(nn.Module):
    """Four pre-norm transformer blocks of width 384 on 196 tokens."""

    def __init__(self, width: int = 384, heads: int = 6, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Block(nn.Module):
    """A transformer block: attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = (
            self.qkv(self.norm1(x))
            .reshape(batch, tokens, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = torch.nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class UNet(nn.Module):
    """A U-Net with four levels of two convolutions each.

    Transposed convolutions with a kernel of 4 and stride 2 lead up again.
    """

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_level(i, o) for i, o in zip((3, *widths), widths, strict=False))
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(i, o, 4, 2, 1) for i, o in pairs)
        self.up = nn.ModuleList(_level(2 * o, o) for _, o in pairs)
        self.last = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level in self.down:
            x = level(nn.functional.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for rise, level, skip in zip(self.rise, self.up, skips[-2::-1], strict=True):
            x = level(torch.cat([rise(x), skip], 1))
        return self.last(x)


def _level(inputs: int, outputs: int) -> nn.Sequential:
    first, second = (
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
    )
    return nn.Sequential(
        first, nn.BatchNorm2d(outputs), nn.ReLU(), second, nn.BatchNorm2d(outputs), nn.ReLU()
    )


def build(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    """Return the network with plausible BatchNorm statistics, and an input."""
    torch.manual_seed(0)
    if name == "encoder":
        return Encoder().eval(), torch.randn(batch, 196, 384)
    if name == "unet":
        model: Any = UNet()
    else:
        import torchvision

        model = getattr(torchvision.models, name)(weights=None)
    model.train()
    with torch.no_grad():
        if name == "vit_b_16":
            model.heads.head.weight.normal_(std=0.02)  # is zero
        for _ in range(3):
            model(torch.randn(4, 3, 224, 224))
    return model.eval(), torch.randn(batch, 3, 224, 224)


def quantized(model: nn.Module, x: Tensor, target: str | None = None) -> nn.Module:
    """Return a copy of ``model``, folded, quantized and calibrated on the timed input."""
    result = copy.deepcopy(model)
    torchq.fuse_(result, x[:1], verify=False)
    torchq.quantize_(result, target=target)
    torchq.calibrate(result, [x[:4]], progress=False)
    return result


def onnxruntime_call(path: Path, x: Tensor, threads: int) -> Callable[[], object]:
    """Return a call of ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def openvino_call(path: Path, x: Tensor, threads: int) -> Callable[[], object]:
    """Return a call of OpenVINO on the CPU, set up for latency."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    request = compiled.create_infer_request()
    data = x.numpy()
    return lambda: request.infer([data])


def torch_candidates(
    model: nn.Module, simulated: nn.Module, x: Tensor, options: argparse.Namespace
) -> Candidates:
    """Return the candidates that run in torch: the float model and the deployed one."""
    folded = copy.deepcopy(simulated)
    torchq.restore_(folded)
    half, half_x = copy.deepcopy(folded).to(torch.bfloat16), x.to(torch.bfloat16)
    if x.dim() == 4:
        half, half_x = (
            half.to(memory_format=torch.channels_last),
            half_x.contiguous(memory_format=torch.channels_last),
        )
    layers, int8 = torchq.deploy(simulated, fuse=False), torchq.deploy(simulated)
    found: Candidates = {
        "fp32 eager": lambda: model(x),
        "fp32 folded": lambda: folded(x),
        "bf16 folded": lambda: half(half_x),
        "int8 layers only": lambda: layers(x),
        "int8": lambda: int8(x),
    }
    best = int8
    if x.dim() == 4:  # with quantized shortcuts, which suit oneDNN as they suit TensorRT
        best = residual = torchq.deploy(quantized(model, x, "tensorrt"))
        found["int8 residual"] = lambda: residual(x)
    if options.compiled:
        found["fp32 compiled"] = (lambda compiled: lambda: compiled(x))(torch.compile(folded))
        found["int8 compiled"] = (lambda compiled: lambda: compiled(x))(torch.compile(best))
    return found


def peer_candidates(
    model: nn.Module, x: Tensor, options: argparse.Namespace, folder: Path
) -> Candidates:
    """Return the candidates of other runtimes, with the quantizers where each wants them."""
    found: Candidates = {}
    for peer, call in (("onnxruntime", onnxruntime_call), ("openvino", openvino_call)):
        with suppress(ImportError):
            path = folder / f"{peer}.onnx"
            torchq.export_onnx(quantized(model, x, peer), (x,), path, target=peer)
            found[f"int8 {peer}"] = call(path, x, options.threads)
    return found


def agreement(simulated: nn.Module, x: Tensor) -> dict[str, float]:
    """Return the agreement of the deployed model with its simulation in dB.

    Both are compared with the simulation in float64 too: a deep network with random weights
    amplifies every tie that is rounded the other way, whoever does it.
    """
    exact = copy.deepcopy(simulated).double()(x.double())
    plain, int8 = simulated(x), torchq.deploy(simulated)(x)
    return {
        "agreement_db": db(int8, plain),
        "int8_to_float64_db": db(int8, exact),
        "simulation_to_float64_db": db(plain, exact),
    }


def db(got: Tensor, expected: Tensor) -> float:
    """Return the ratio of signal to error in dB."""
    error = (got.double() - expected.double()).square().sum()
    return (
        float(10 * torch.log10(expected.double().square().sum() / error)) if error else float("inf")
    )


def memory(simulated: nn.Module) -> dict[str, int]:
    """Return the bytes of the float parameters and of the tensors of the deployed model.

    Kernels keep a copy of the integer weights in their own layout, which does not count here.
    """
    int8 = torchq.deploy(simulated)
    tensors = {
        t.data_ptr(): t.numel() * t.element_size() for t in (*int8.parameters(), *int8.buffers())
    }
    return {
        "float_bytes": sum(t.numel() * t.element_size() for t in simulated.parameters()),
        "int8_bytes": sum(tensors.values()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run all candidates and report their times."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    arguments.add_argument("--batch", nargs="+", type=int, default=[1])
    arguments.add_argument(
        "--compiled",
        action="store_true",
        help="torch.compile as well (needs a C++ compiler, takes minutes)",
    )
    arguments.add_argument(
        "--peers", action="store_true", help="ONNX Runtime and OpenVINO as well, where installed"
    )
    options = parse(arguments, argv)
    with (
        Reporter("deploy_native", options.out, packages=("onnxruntime", "openvino")) as report,
        torch.no_grad(),
    ):
        for name in options.models:
            for batch in options.batch:
                model, x = build(name, batch)
                simulated = quantized(model, x)
                case = {"model": name, "batch": batch, "threads": options.threads}
                report.value(**case, **agreement(simulated, x[:4]), **memory(simulated))
                with tempfile.TemporaryDirectory() as folder:
                    found = torch_candidates(model, simulated, x, options)
                    if options.peers:
                        found |= peer_candidates(model, x, options, Path(folder))
                    for row in compare(found, baseline="fp32 eager", **timing(options)):
                        report.timing(row, **case, speedup=1 / row.ratio)


if __name__ == "__main__":
    main()
