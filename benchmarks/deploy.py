"""Time the engines of ``torchq.deploy`` on whole networks, beside FP32 and BF16 of torch.

All candidates run the same network with random weights, calibrated with the placement for their
engine. "fastest" is what ``target="fastest"`` takes of the network placed for OpenVINO, timed once
more among the others; ``behind_best`` compares it with the best of them. The engine "torch" runs
that network too, and one with the placement and the codes that suit it best. BatchNorm is folded
first for every candidate but the baseline, which is FP32 eager as a user would run it: the model as
built, in eval mode, without gradients. Engines that are not installed are left out. A file that has
results already is continued.
"""

from __future__ import annotations

import argparse
import copy
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.harness import (
    Reporter,
    compare,
    decibels,
    finished_rows,
    parse,
    parser,
    timing,
)
from torchq.errors import ExportError, MissingExtraError
from torchq.graph import call_model
from torchq.lowering.api import simulated_copy
from torchq.lowering.kernel import saturates
from torchq.runtimes import RUNTIMES, Engine, OnnxRuntime
from torchq.runtimes.engine import Task
from torchq.runtimes.fastest import build_fastest

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "encoder", "vit_b_16", "unet")
#: Twenty networks of torchvision.
ZOO = (
    *("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "shufflenet_v2_x1_0"),
    *(
        "resnet18",
        "resnet50",
        "squeezenet1_1",
        "efficientnet_b0",
        "mnasnet1_0",
        "googlenet",
    ),
    *(
        "regnet_x_400mf",
        "regnet_y_400mf",
        "resnext50_32x4d",
        "densenet121",
        "alexnet",
        "vgg11",
    ),
    *("convnext_tiny", "vit_b_16", "swin_t", "inception_v3"),
)
TRANSFORMERS = ("encoder", "vit_b_16", "swin_t")
#: The targets that the networks are placed for, and the one of the model for "fastest".
PLACEMENTS = ("onnxruntime", "openvino")
FASTEST = "openvino"
Candidates = dict[str, Callable[[], object]]


class Block(nn.Module):
    """A transformer block: attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * width, width)

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
        self.down = nn.ModuleList(
            _level(i, o) for i, o in zip((3, *widths), widths, strict=False)
        )
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
    first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(
        first,
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        second,
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def build(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    """Return the network with plausible BatchNorm statistics, and an input."""
    torch.manual_seed(0)
    if name == "encoder":
        # Four pre-norm transformer blocks of width 384 on 196 tokens.
        blocks = nn.Sequential(*(Block(384, 6) for _ in range(4)))
        return blocks.eval(), torch.randn(batch, 196, 384)
    if name == "unet":
        model: Any = UNet()
    elif name.startswith("timm/"):
        model = import_module("timm").create_model(name.removeprefix("timm/"))
    else:
        import torchvision

        # Branches that only training uses are left out, as with torchvision's trained weights.
        branched = name in ("googlenet", "inception_v3")
        options = {"init_weights": False, "aux_logits": False} if branched else {}
        model = getattr(torchvision.models, name)(weights=None, **options)
    model.train()
    with torch.no_grad():
        vary_constants_(model)
        for _ in range(3):
            model(torch.randn(4, 3, 224, 224))
    return model.eval(), torch.randn(batch, 3, 224, 224)


def vary_constants_(model: nn.Module) -> None:
    """Give random values to what is 0, 1 or tiny before training, and which runtimes delete."""
    for module in model.modules():
        if type(module).__name__ == "LearnableAffineBlock":  # HGNetV2: 1 and 0.
            nn.init.uniform_(module.scale, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    for name, parameter in model.named_parameters():
        # ConvNeXt: 1e-6, which codes make 0.
        if name.endswith((".gamma", ".layer_scale")):
            nn.init.uniform_(parameter, 0.5, 1.5)
        # Torchvision's ViT: 0, as is every result then.
        if name == "heads.head.weight":
            nn.init.normal_(parameter, std=0.02)


def quantized(
    model: nn.Module,
    x: Tensor,
    target: str | None = None,
    config: torchq.QuantConfig | None = None,
) -> nn.Module:
    """Return a copy of ``model``, folded, quantized and calibrated on the timed input.

    Weights have 7 bits where kernels add products in 16 bits; those of ONNX Runtime can do without.
    """
    if config is None and target != "onnxruntime":
        config = torchq.recipes.int8(reduce_range=saturates())
    result = copy.deepcopy(model)
    torchq.fuse_(result, x[:1], verify=False)
    torchq.quantize_(result, config, target=target, example=x[:1] if target else None)
    torchq.calibrate(result, [x[:4]], progress=False)
    return result


def quantized_for_torch(model: nn.Module, x: Tensor) -> nn.Module:
    """Return what suits the engine "torch" best, like :func:`quantized`.

    Shortcuts of images are quantized, as for TensorRT. Values that are never negative have
    unsigned codes: all of these are used, so no kernel has to clamp.
    """
    config = torchq.recipes.integer(7 if saturates() else 8, 8, unsigned="auto")
    return quantized(model, x, "tensorrt" if x.dim() == 4 else None, config)


# --- candidates -----------------------------------------------------------------------------------


def onnxruntime_call(path: Path, x: Tensor, threads: int) -> Callable[[], Any]:
    """Return one inference in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    feeds = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feeds)


def openvino_call(
    path: Path, x: Tensor, threads: int, precision: str = "f32"
) -> Callable[[], Any]:
    """Return one inference in OpenVINO; float32 stays float32 unless ``precision`` is bf16."""
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


DIRECT: dict[str, Callable[[Path, Tensor, int], Callable[[], Any]]] = {
    "onnxruntime": onnxruntime_call,
    "openvino": openvino_call,
}


def onnxruntime_static(
    source: Path,
    path: Path,
    images: Sequence[Tensor],
    transformer: bool,
    default: bool = False,
) -> str:
    """Quantize with ``onnxruntime.quantization``, after its own preprocessing.

    It writes Q/DQ, uint8 activations, int8 weights per channel. In transformers it quantizes only
    products with weights, as its guide advises; everything else is its default, or all of it.
    """
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [{"x": image.numpy()} for image in images]

        def get_next(self) -> dict[str, Any] | None:
            return self.left.pop(0) if self.left else None

    prepared = path.with_suffix(".prepared.onnx")
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    options: dict[str, Any] = {}
    if transformer:
        options = {
            "op_types_to_quantize": ["MatMul", "Gemm"],
            "extra_options": {"MatMulConstBOnly": True},
        }
    if not default:
        options |= {
            "per_channel": True,
            "activation_type": quantization.QuantType.QUInt8,
            "weight_type": quantization.QuantType.QInt8,
        }
    quantization.quantize_static(str(prepared), str(path), Reader(), **options)
    return "onnxruntime.quantization"


def nncf(
    source: Path,
    path: Path,
    images: Sequence[Tensor],
    transformer: bool,
    **options: Any,
) -> str:
    """Quantize with OpenVINO's NNCF, by its defaults for the kind of model; write ``.xml``."""
    import nncf as tool
    import openvino

    logging.getLogger("nncf").setLevel(logging.ERROR)
    model = openvino.Core().read_model(str(source))
    kind = tool.ModelType.TRANSFORMER if transformer else None
    data = tool.Dataset([image.numpy() for image in images])
    if "preset" in options:
        options["preset"] = tool.QuantizationPreset(options["preset"])
    quantized = tool.quantize(
        model, data, model_type=kind, subset_size=len(images), **options
    )
    openvino.save_model(quantized, str(path), compress_to_fp16=False)
    return "nncf"


#: Runtime -> its maker's quantizer and the suffix of the file that it writes.
MAKERS: dict[str, tuple[Callable[[Path, Path, Sequence[Tensor], bool], str], str]] = {
    "onnxruntime": (onnxruntime_static, ".onnx"),
    "openvino": (nncf, ".xml"),
}


def engine_candidates(
    tasks: dict[str, Task], engines: Sequence[str]
) -> tuple[Candidates, dict[str, nn.Module]]:
    """Return engines that are installed, with the quantized model and with the float one.

    Args:
        tasks: by target; an engine that is no target takes that of ``FASTEST``.
        engines: their names.
    """
    calls: Candidates = {}
    modules: dict[str, nn.Module] = {}
    for name in engines:
        engine = RUNTIMES[name]
        assert isinstance(engine, Engine)
        try:
            engine.check()
        except MissingExtraError as error:
            print(f"# {error}", flush=True)
            continue
        task = _placed(tasks, name)
        for candidate in engine.candidates():
            try:
                module = candidate.build(task)
            except ExportError as error:
                print(f"# {candidate.label}: {error}", flush=True)
                continue
            modules[candidate.label] = module
            calls[candidate.label] = (lambda m, x: lambda: call_model(m, x))(
                module, task.example
            )
    return calls, modules


def torch_candidates(model: nn.Module, simulated: nn.Module, x: Tensor) -> Candidates:
    """Return the float model as users run it, and the engine "torch" with its own placement."""
    folded = copy.deepcopy(simulated)
    torchq.restore_(folded)
    half = copy.deepcopy(folded).to(torch.bfloat16)
    half_x = x.to(torch.bfloat16)
    if x.dim() == 4:
        half, half_x = (
            half.to(memory_format=torch.channels_last),
            half_x.contiguous(memory_format=torch.channels_last),
        )
    int8 = torchq.deploy(quantized_for_torch(model, x), x)
    calls: Candidates = {
        "fp32 eager": lambda: model(x),
        "bf16 folded": lambda: half(half_x),
        "torch quantized, own placement": lambda: int8(x),
    }
    return calls


def maker_candidates(
    task: Task, x: Tensor, transformer: bool, options: argparse.Namespace
) -> Candidates:
    """Return the float file as the quantizers of the engines' makers quantize it.

    Args:
        task: the network.
        x: its input.
        transformer: quantize as the makers advise for transformers.
        options: of the command line.
    """
    calls: Candidates = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "float.onnx")
        for engine, (quantize, suffix) in MAKERS.items():
            if engine not in options.engines:
                continue
            path = Path(folder, engine).with_suffix(suffix)
            try:
                source.write_bytes(
                    OnnxRuntime(quantized=False).build(task).graph_bytes()
                )
                label = quantize(source, path, [x[:1], x[-1:]], transformer)
                calls[label] = DIRECT[engine](path, x, options.threads)
                if engine == "openvino":
                    calls[f"{label} bf16"] = openvino_call(
                        path, x, options.threads, "bf16"
                    )
            # A tool may fail in any way it likes, or be absent.
            except Exception as error:
                print(f"# {engine}: {error}", flush=True)
    return calls


def measure(
    name: str, batch: int, options: argparse.Namespace, report: Reporter
) -> None:
    """Time all candidates on one network, and report which one ``target="fastest"`` takes."""
    model, x = build(name, batch)
    case = {"model": name, "batch": batch, "threads": options.threads}
    tasks = {
        name: Task(simulated_copy(quantized(model, x, name)), x) for name in PLACEMENTS
    }
    task = tasks[FASTEST]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # First, because it needs memory for all candidates as well.
        chosen, choice = build_fastest(task)
        engines, modules = engine_candidates(tasks, options.engines)
        calls = torch_candidates(model, quantized(model, x), x) | engines
        calls["fastest"] = lambda: chosen(x)
        makers = (
            maker_candidates(task, x, name in TRANSFORMERS, options)
            if options.makers
            else {}
        )
        clock = time.process_time if options.cpu_time else time.perf_counter
        rows = compare(
            calls | makers, baseline="fp32 eager", clock=clock, **timing(options)
        )
    for row in rows:
        report.timing(row, **case, speedup=1 / row.ratio, clock=clock.__name__)
    best = {row.candidate: row.least_s for row in rows}
    rivals = {name: s for name, s in best.items() if name in modules or name in makers}
    report.value(
        **case,
        fastest=choice.chosen,
        behind_best=best["fastest"] / min(rivals.values()) - 1,
        agreement_db={
            label: decibels(module(x), _placed(tasks, label).model(x))
            for label, module in modules.items()
        },
    )


def _placed(tasks: dict[str, Task], label: str) -> Task:
    """Return what the engine with a label runs."""
    return tasks.get(label.split()[0], tasks[FASTEST])


def main(argv: Sequence[str] | None = None) -> None:
    """Run all candidates and report their times."""
    arguments = parser(__doc__)
    models = "names, 'timm/NAME', or 'zoo' for 20 nets of torchvision"
    arguments.add_argument("--models", nargs="+", default=MODELS, help=models)
    arguments.add_argument("--batch", nargs="+", type=int, default=[1])
    engines = "those to time one by one, where all need more memory than there is"
    runtimes = RUNTIMES.values()
    names = [r.name for r in runtimes if isinstance(r, Engine) and r.measured]
    arguments.add_argument(
        "--engines", nargs="+", default=names, choices=names, help=engines
    )
    makers = "the quantizers of the engines' makers as well"
    arguments.add_argument("--makers", action="store_true", help=makers)
    clock = "measure processor time, with one thread: other programs then count little"
    arguments.add_argument("--cpu-time", action="store_true", help=clock)
    options = parse(arguments, argv)
    names = [n for name in options.models for n in (ZOO if name == "zoo" else (name,))]
    key = ("model", "batch", "threads")
    done = {row[1:] for row in finished_rows(options.out, "fastest", *key) if row[0]}
    packages = ("onnxruntime", "openvino")
    with Reporter("deploy_native", options.out, packages) as report, torch.no_grad():
        for name in names:
            for batch in options.batch:
                if (name, batch, options.threads) not in done:
                    measure(name, batch, options, report)


if __name__ == "__main__":
    main()
