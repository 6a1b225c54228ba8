"""Does a network that was trained quantized, and folded then, run on integers as it was trained?

For networks x runtimes x precisions of the checkpoint: a network is prepared for a runtime, trains
for some steps on random images, and its BatchNorms are folded. A row says how many folded, which
were refused and why, how many weight codes changed beyond those that the report counts (compared
here, layer by layer, with copies of before), whether the model is quantized as the same network
that was fused first and quantized then, how many layers have integer weights in the file beside
the file of that one, and what ``torchq.verify_onnx`` says.

With ``--data`` the trained ResNet-20 of CIFAR-10 trains on for 300 steps for each runtime, and the
accuracy on test images is that of the trained model, of the folded one, and of the file.

Every row is stored as it comes, and a second run goes on after the rows of the file.

Example:
    python -m benchmarks.fold_after_training --out benchmarks/results/fold_after_training.jsonl
    python -m benchmarks.fold_after_training --data DIR --only "resnet20 *" --out FILE
    python -m benchmarks.fold_after_training --out FILE --table
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import accuracy, logits, read_split, resnet20
from benchmarks.harness import Reporter, finished_rows, parse, parser
from benchmarks.training import Training, fit
from benchmarks.zoo_models import build
from torchq.fusion import FuseReport
from torchq.graph import tensors_in
from torchq.nn import TensorQuantizer
from torchq.nn.weight_grid import GridComparison
from torchq.runtime import RUNTIMES, open_session
from torchq.swap import Plan, plan_of
from torchq.utils.text import table

TARGETS = ("onnxruntime", "openvino", "tensorrt")
#: Of a checkpoint: the weights are stored in it and read again before the fold.
PRECISIONS = {"float32": torch.float32, "float16": torch.float16}
_KEY = ("network", "target", "checkpoint")
_SIZE = 64
_STEPS, _BATCH = 20, 4
_TRAINED_STEPS, _TRAINED_LR = 300, 0.003
#: The element types of ONNX that codes of weights are stored in: uint8, int8, int4 and uint4.
_CODES = (2, 3, 21, 22)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """A U-Net of three levels with a BatchNorm behind each transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _block(3, 16)
        self.second = _block(16, 32)
        self.lowest = _block(32, 64)
        self.up2 = nn.ConvTranspose2d(64, 32, 2, 2, bias=False)
        self.norm2 = nn.BatchNorm2d(32)
        self.up1 = nn.ConvTranspose2d(32, 16, 2, 2, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.join2, self.join1 = _block(64, 32), _block(32, 16)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to (N, 4, H, W)."""
        first = self.first(x)
        second = self.second(self.pool(first))
        x = self.norm2(self.up2(self.lowest(self.pool(second)))).relu()
        x = self.norm1(self.up1(self.join2(torch.cat([x, second], 1)))).relu()
        return self.head(self.join1(torch.cat([x, first], 1)))


def _torchvision(name: str) -> nn.Module:
    from torchvision.models import get_model

    return get_model(name)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: _torchvision("resnet18"),
    "mobilenet_v2": lambda: _torchvision("mobilenet_v2"),
    "unet": UNet,
    "smp unet": lambda: build("smp/Unet").model,
    "yolo11n": lambda: build("ultralytics/yolo11n").model,
    "regnet_y_400mf": lambda: _torchvision("regnet_y_400mf"),
    "shufflenet_v2_x1_0": lambda: _torchvision("shufflenet_v2_x1_0"),
}


@torch.no_grad()
def give_statistics(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Let the BatchNorms of a float model with random weights have the statistics of batches.

    With those that they begin with, the values of a deep network vanish in eval mode, and its
    ranges would be those of rounding errors.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean of all batches
    model.train()
    for batch in batches:
        model(batch)
    model.eval()
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum


def train(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Train in place on the squares of all outputs, and end in eval mode."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    model.train()
    for batch in batches:
        results = [t for t in tensors_in(model(batch)) if t.is_floating_point()]
        loss = torch.stack([result.square().mean() for result in results]).sum()
        optimizer.zero_grad()
        loss.backward()
        # Some diverge to infinity otherwise.
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def through_checkpoint(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy whose parameters were stored in another precision."""
    stored = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in stored.named_parameters():
            if not name.endswith(("amax", "amin")):  # ranges are float32 always
                parameter.copy_(parameter.to(dtype).to(parameter.dtype))
    return stored


def changed_codes(
    before: nn.Module, after: nn.Module, report: FuseReport
) -> tuple[int, int]:
    """Return how many weight codes changed in more than their sign, and how many there are.

    The scale of each output channel grew by its factor, which is what the scales are asked for.
    """
    changed = codes = 0
    for fusion in report.fused:
        old, new = (model.get_submodule(fusion.name) for model in (before, after))
        quantizers = [getattr(layer, "weight_quantizer", None) for layer in (old, new)]
        if not all(isinstance(quantizer, TensorQuantizer) for quantizer in quantizers):
            continue
        factor = _factors(before.get_submodule(fusion.parts[0]), old)
        weights = [layer.weight.detach() for layer in (old, new)]
        compared = GridComparison.of(
            quantizers[0], weights[0], quantizers[1], weights[1], factor
        )
        changed += int(compared.other_codes.sum())
        codes += weights[0].numel()
    return changed, codes


def _factors(norm: Any, layer: Any) -> Tensor:
    """Return what the BatchNorm multiplies each weight of a layer by, from its definition."""
    gamma = (
        torch.ones_like(norm.running_var)
        if norm.weight is None
        else norm.weight.detach()
    )
    factor = gamma.double() / (norm.running_var.double() + norm.eps).sqrt()
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    shape = [-1 if dim == axis else 1 for dim in range(layer.weight.dim())]
    return factor.reshape(shape).expand(layer.weight.shape)


def recipe_for(target: str) -> torchq.QuantConfig:
    """Return INT8, with 7 bits for weights where kernels overflow on this processor."""
    overflows = target == "openvino" and bool(RUNTIMES[target].excuse())
    return torchq.recipes.int8(reduce_range=overflows)


def outcome(model: nn.Module) -> Plan:
    """Return what is quantized in a model and how, whatever was fused in which order."""
    planned = plan_of(model).outcome()
    # Training leaves -128 out of weights in front of norms, which keeps the scales.
    rows = tuple(
        d
        if d.weight is None
        else replace(d, weight=d.weight.replace(narrow_range=False))
        for d in planned.decisions
    )
    return replace(planned, decisions=rows, fusions=())


def integer_layers(path: Path) -> int:
    """Return how many weights a file stores as codes."""
    stored = onnx.load(path).graph.initializer
    return sum(tensor.data_type in _CODES and len(tensor.dims) > 1 for tensor in stored)


def exported(model: nn.Module, batch: Tensor, path: Path) -> tuple[int, bool]:
    """Write a model for its runtime; return the layers with integer weights, and if it agrees."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchq.export_onnx(model, batch, path, dynamo=False, progress=False)
        verified = torchq.verify_onnx(model, path, [batch], progress=False)
    return integer_layers(path), verified.ok


def measured(
    trained: nn.Module, first: nn.Module, batch: Tensor, layers: int
) -> dict[str, Any]:
    """Fold a trained model in place; return what became of it, beside the one folded first."""
    before = copy.deepcopy(trained)
    started = time.perf_counter()
    report = torchq.fuse_(trained, batch, progress=False)
    seconds = round(time.perf_counter() - started, 1)
    changed, codes = changed_codes(before, trained, report)
    counted = sum(fusion.changed for fusion in report.fused)
    with tempfile.TemporaryDirectory() as folder:
        integers, agrees = exported(trained, batch, Path(folder, "folded.onnx"))
        integers_first, agrees_first = exported(
            first, batch, Path(folder, "first.onnx")
        )
    return {
        "folded": len(report.fused),
        "refused": {refusal.name: refusal.reason for refusal in report.refused},
        "applied": report.applied,
        "codes": codes,
        "counted": counted,
        "changed_beyond": changed - counted,
        "layer_error": max((fusion.error for fusion in report.fused), default=0.0),
        "model_error": report.error,
        "same_plan": outcome(trained) == outcome(first),
        "integers": integers,
        "integers_folded_first": integers_first,
        "layers": layers,
        "verify": agrees,
        "verify_folded_first": agrees_first,
        "seconds": seconds,
    }


def untrained_rows(options: argparse.Namespace, report: Reporter) -> None:
    """Report a row for each network, runtime and precision that is chosen."""
    done = finished_rows(options.out, *_KEY)
    for network, make in NETWORKS.items():
        for target in TARGETS:
            unfinished = [p for p in PRECISIONS if (network, target, p) not in done]
            if not unfinished or not fnmatchcase(f"{network} {target}", options.only):
                continue
            torch.manual_seed(0)
            steps = 1 if options.quick else _STEPS
            batches = [torch.randn(_BATCH, 3, _SIZE, _SIZE) for _ in range(steps)]
            model = make().eval()
            with torch.no_grad():
                model(batches[0])  # heads of detectors keep anchors of their first call
            give_statistics(model, batches)
            first = copy.deepcopy(model)
            torchq.fuse_(first, batches[0], progress=False)
            recipe = recipe_for(target)
            options_of_both = {"target": target, "progress": False}
            torchq.quantize_(first, recipe, example=batches[0], **options_of_both)
            torchq.calibrate(first, batches[:2], correct=False, progress=False)
            prepared = torchq.qat.prepare(model, batches[:2], recipe, **options_of_both)
            layers = sum(d.weight is not None for d in prepared.quantized.replaced)
            train(model, batches)
            for precision in unfinished:
                trained = through_checkpoint(model, PRECISIONS[precision])
                row = measured(trained, first, batches[0], layers)
                cell = dict(zip(_KEY, (network, target, precision), strict=True))
                report.value(**cell, recipe=recipe.name, **row)


def trained_rows(options: argparse.Namespace, report: Reporter) -> None:
    """Report the accuracy of a network with real weights for each runtime: trained, folded, file.

    All three see the same test images.
    """
    done = finished_rows(options.out, *_KEY)
    test = read_split(options.data, "test", options.images)
    data = read_split(options.data, "train", 128 if options.quick else 50_000)
    steps = 1 if options.quick else _TRAINED_STEPS
    for target in TARGETS:
        cell = ("resnet20", target, "float32")
        if cell in done or not fnmatchcase(f"resnet20 {target}", options.only):
            continue
        model = resnet20(options.data)
        batches = data.batches(64)[:8]
        recipe = recipe_for(target)
        torchq.qat.prepare(model, batches, recipe, target=target, progress=False)
        fit(model, data, Training(steps, _TRAINED_LR))
        shares = {"trained": accuracy(logits(model, test), test)}
        folds = torchq.fuse_(model, batches[0], progress=False)
        shares["folded"] = accuracy(logits(model, test), test)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "resnet20.onnx")
            integers, agrees = exported(model, batches[0], path)
            shares["file"] = accuracy(
                _results_of_file(path, target, test.batches(250)), test
            )
        report.value(
            **dict(zip(_KEY, cell, strict=True)),
            recipe=recipe.name,
            steps=steps,
            images=options.images,
            folded=len(folds.fused),
            refused={refusal.name: refusal.reason for refusal in folds.refused},
            counted=sum(fusion.changed for fusion in folds.fused),
            integers=integers,
            verify=agrees,
            accuracy={name: round(100 * share, 2) for name, share in shares.items()},
        )


def _results_of_file(path: Path, target: str, batches: Sequence[Tensor]) -> Tensor:
    """Run a file in its runtime, or in the reference where that is not here."""
    run = RUNTIMES[target].opened(path)
    session = open_session(path, optimize=True)
    name = session.inputs[0]
    if run is None:
        run = session.run
    return torch.cat([run({name: batch})[0].float() for batch in batches])


def print_table(path: Path) -> None:
    """Print the rows of a file."""
    heading = (
        "network",
        "target",
        "checkpoint",
        "folded",
        "refused",
        "codes",
        "counted",
        "beyond",
    )
    heading += ("layer", "model", "plan", "integers", "folded first", "verify")
    rows = []
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] != "result":
            continue
        cells = [*(row[name] for name in _KEY), row["folded"], len(row["refused"])]
        if "accuracy" in row:
            shares = ", ".join(
                f"{name} {share}" for name, share in row["accuracy"].items()
            )
            cells += ["", row["counted"], "", "", "", "", row["integers"], "", shares]
        else:
            cells += [row["codes"], row["counted"], row["changed_beyond"]]
            cells += [f"{row['layer_error']:.1e}", f"{row['model_error']:.1e}"]
            cells += ["same" if row["same_plan"] else "OTHER"]
            cells += [
                f"{row['integers']} of {row['layers']}",
                row["integers_folded_first"],
            ]
            agree = [row["verify"], row["verify_folded_first"]]
            cells += [" / ".join("ok" if ok else "DIFFERS" for ok in agree)]
        rows.append(tuple(map(str, cells)))
    print(table([heading, *rows]))


def main(argv: Sequence[str] | None = None) -> None:
    """Report one line for each cell of the table."""
    options = parser(__doc__)
    options.add_argument("--only", default="*", help="pattern of 'NETWORK TARGET'")
    options.add_argument(
        "--data", type=Path, help="folder of CIFAR-10 and the trained networks"
    )
    options.add_argument("--images", type=int, default=10_000, help="test images of it")
    options.add_argument(
        "--table", action="store_true", help="print the rows of --out alone"
    )
    chosen = parse(options, argv)
    if chosen.table:
        print_table(chosen.out)
        return
    packages = ("onnxruntime", "openvino", "ultralytics", "segmentation-models-pytorch")
    with Reporter("fold_after_training", chosen.out, packages) as report:
        if chosen.data is None:
            untrained_rows(chosen, report)
        else:
            trained_rows(chosen, report)


if __name__ == "__main__":
    main()
