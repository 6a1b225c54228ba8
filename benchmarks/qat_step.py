"""One step of quantization-aware training over the same step in float.

A step is forward, cross-entropy, backward and SGD. The models are the CIFAR ResNet-20 (batch 64,
32x32), torchvision's ResNet-18 (batch 8, 224x224) and a ViT-Tiny (batch 8, 224x224, patches of 16).
Weights are INT8 per channel and inputs INT8 per tensor, with fixed ranges where the tool has them
(torchao uses the range of each token). ``aten`` is a parametrization and a hook around torch's own
operators. NVIDIA ModelOpt, Brevitas and torchao compete where they are installed. aten and torchao
leave the attention of a transformer float; torchao quantizes Linear layers alone.

``fp32`` is 1; compiled candidates refer to ``fp32 compiled``. On one thread the clock is CPU time.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
import torchvision
from torch import Tensor, nn

import torchq
from benchmarks.cifar import resnet20
from benchmarks.harness import Reporter, compare, parse, parser, timing

Step = Callable[[], object]


def vit_tiny() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=224,
        patch_size=16,
        num_layers=12,
        num_heads=3,
        hidden_dim=192,
        mlp_dim=768,
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-20": (resnet20, (64, 3, 32, 32)),
    "ResNet-18": (lambda: torchvision.models.resnet18(weights=None), (8, 3, 224, 224)),
    "ViT-Tiny": (vit_tiny, (8, 3, 224, 224)),
}


def ours(model: nn.Module, x: Tensor) -> nn.Module:
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    return model


def modelopt(model: nn.Module, x: Tensor) -> nn.Module:
    tool = import_module("modelopt.torch.quantization")
    return tool.quantize(model, tool.INT8_DEFAULT_CFG, forward_loop=lambda m: m(x))


def brevitas(model: nn.Module, x: Tensor) -> nn.Module:
    return import_module("brevitas.graph.quantize").layerwise_quantize(model)


class Aten(nn.Module):
    """torch's own fake-quantize operators with a fixed range.

    With ``axis`` 0 it parametrizes a weight; without, it stands before a layer.
    """

    def __init__(self, x: Tensor, axis: int | None = None) -> None:
        super().__init__()
        self.axis = axis
        magnitude = x.detach().abs()
        amax = magnitude.amax() if axis is None else magnitude.flatten(1).amax(1)
        self.register_buffer("scale", amax / 127)
        self.register_buffer(
            "zero_point", torch.zeros_like(self.scale, dtype=torch.int32)
        )

    def forward(self, x: Tensor) -> Tensor:
        qparams = self.scale, self.zero_point
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(x, *qparams, -128, 127)
        return torch.fake_quantize_per_channel_affine(x, *qparams, self.axis, -128, 127)


def aten(model: nn.Module, x: Tensor) -> nn.Module:
    inputs: dict[nn.Module, Tensor] = {}
    layers = [m for m in model.modules() if type(m) in (nn.Conv2d, nn.Linear)]
    hooks = [
        m.register_forward_pre_hook(lambda m, args: inputs.__setitem__(m, args[0]))
        for m in layers
    ]
    with torch.no_grad():
        model(x)
    for hook, layer in zip(hooks, layers, strict=True):
        hook.remove()
        quantize = Aten(inputs[layer])
        layer.register_forward_pre_hook(
            lambda m, args, quantize=quantize: quantize(args[0])
        )
        nn.utils.parametrize.register_parametrization(
            layer, "weight", Aten(layer.weight, axis=0)
        )
    return model


def torchao(model: nn.Module, x: Tensor) -> nn.Module:
    if any(isinstance(m, nn.Conv2d) and m.kernel_size[0] == 3 for m in model.modules()):
        raise NotImplementedError("torchao quantizes Linear layers alone")
    qat = import_module("torchao.quantization.qat")
    inputs = qat.IntxFakeQuantizeConfig(
        torch.int8, "per_token", is_symmetric=False
    )  # it has no symmetric one
    weights = qat.IntxFakeQuantizeConfig(torch.int8, "per_channel")
    import_module("torchao.quantization").quantize_(
        model,
        qat.QATConfig(activation_config=inputs, weight_config=weights, step="prepare"),
    )
    return model


TOOLS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "fp32": lambda model, x: model,
    "torchq": ours,
    "aten": aten,
    "modelopt": modelopt,
    "brevitas": brevitas,
    "torchao": torchao,
}


def make_step(name: str, tool: str, compiled: bool = False) -> Step:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = build().train()
    target = torch.randint(0, model(x).shape[1], (len(x),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = TOOLS[tool](model, x).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(run(x), target).backward()
        optimizer.step()

    step()
    return step


def steps(name: str, tools: Sequence[str], compiled: bool) -> dict[str, Step]:
    step_by_tool: dict[str, Step] = {}
    for tool in tools:
        try:
            step_by_tool[tool + " compiled" * compiled] = make_step(
                name, tool, compiled
            )
        # A rival that is absent or cannot do a model stops nothing.
        except Exception as error:
            if tool in ("fp32", "torchq"):
                raise
            print(
                f"left out of {name}: {tool} ({type(error).__name__})", file=sys.stderr
            )
    return step_by_tool


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--models", default=",".join(MODELS), help="default: %(default)s"
    )
    options.add_argument(
        "--tools", default=",".join(TOOLS), help="default: %(default)s"
    )
    modes = "of eager, compiled (needs a C++ compiler); default: %(default)s"
    options.add_argument("--modes", default="eager", help=modes)
    chosen = parse(options, argv)
    clock = time.thread_time if chosen.threads == 1 else time.perf_counter
    packages = ("nvidia-modelopt", "brevitas", "torchao")
    with Reporter("qat_step", chosen.out, packages) as report:
        for name in chosen.models.split(","):
            for mode in chosen.modes.split(","):
                compiled = mode == "compiled"
                step_by_tool = steps(name, chosen.tools.split(","), compiled)
                baseline = "fp32" + " compiled" * compiled
                for row in compare(
                    step_by_tool, baseline=baseline, clock=clock, **timing(chosen)
                ):
                    report.timing(row, model=name, mode=mode, clock=clock.__name__)


if __name__ == "__main__":
    main()
