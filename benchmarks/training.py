"""Accuracy of trained networks after quantization-aware training, beside calibration alone.

Each case trains, folds BatchNorm afterwards and measures the folded network. The first and the last
layer have 8 bits. Nothing sees a test image before the test. With ``--out`` a run goes on after the
rows that the file has already.

Example:
    python -m benchmarks.training --data DIR --only "resnet20 w4a4 *" --bf16
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images, accuracy, logits, read_split, resnet20
from benchmarks.harness import Reporter, finished_rows, parse, parser
from torchq.qat import (
    Distillation,
    learn_ranges_,
    param_groups,
    prepare,
    reestimate_bn_,
)
from torchq.utils import progress_bar

_BATCH = 64


@dataclass(frozen=True)
class Training:
    """How long and how fast to train, with SGD and a cosine to 0; weights alone decay."""

    steps: int
    lr: float
    weight_decay: float = 1e-4
    seed: int = 0
    input_range_lr: float | None = None


def fit(
    model: nn.Module,
    data: Images,
    training: Training,
    run: Callable[[Tensor], Tensor] | None = None,
    distillation: Distillation | None = None,
) -> None:
    """Train in place, against the labels or the float twin, and end in eval mode.

    Args:
        model: what is trained.
        data: images of training; a step takes 64 that the seed draws.
        training: how long and how fast.
        run: computes what the model does, by default the model itself.
        distillation: of the float twin; without it the labels teach.
    """
    generator = torch.Generator().manual_seed(training.seed)
    torch.manual_seed(training.seed)
    groups = param_groups(
        model,
        lr=training.lr,
        weight_decay=training.weight_decay,
        input_range_lr=training.input_range_lr,
    )
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    model.train()
    for _ in progress_bar(range(training.steps), description="train", unit="step"):
        index = torch.randint(len(data.labels), (_BATCH,), generator=generator)
        images, labels = data.augmented(index, generator)
        y = (run or model)(images)
        loss = (
            F.cross_entropy(y, labels) if distillation is None else distillation.loss()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def fit_transformer(
    model: nn.Module,
    samples: int,
    batch_of: Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]],
    steps: int,
) -> None:
    """Train a float transformer in place with AdamW, and end in eval mode.

    Args:
        model: what is trained.
        samples: how many there are.
        batch_of: returns inputs and labels of the samples with some numbers.
        steps: of training, with a batch each.
    """
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps + 1)
    model.train()
    for _ in progress_bar(range(steps), description="train", unit="step"):
        index = torch.randint(samples, (_BATCH,), generator=generator)
        inputs, labels = batch_of(index, generator)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


@dataclass(frozen=True)
class Method:
    """How training differs from LSQ on all ranges, with the logits of the float twin.

    Attributes:
        weight_ranges: how ranges of weights learn, as for ``learn_ranges_``; None fixes them.
        input_ranges: the same for activations.
        input_range_speed: the learning rate of ranges of activations over that of weights.
        loss: ``"logits"`` of the float twin, or ``"labels"``.
        per_channel: weights have a range per output channel.
    """

    weight_ranges: str | None = "lsq"
    input_ranges: str | None = "lsq"
    input_range_speed: float | None = None
    loss: str = "logits"
    per_channel: bool = True


#: The methods that are compared with one another, all with few steps.
_METHODS = {
    "lsq": Method(),
    "lsq, fast input ranges": Method(input_range_speed=64.0),
    "fixed ranges": Method(weight_ranges=None, input_ranges=None),
    "pact": Method(input_ranges="pact"),
    "labels": Method(loss="labels"),
    "per tensor": Method(per_channel=False),
    "lsq+": Method(input_ranges="lsq+"),
}
_SHORT = "short: "
_SHORT_STEPS, _SHORT_LR = 150, 0.01
#: Name -> bits of weights and activations, steps of training, and learning rate.
_TRAINED = {
    "w8a8": (8, 8, 300, 0.003),
    "w4a8": (4, 8, 600, 0.01),
    "w4a4": (4, 4, 1000, 0.01),
    "w3a3": (3, 3, 1500, 0.02),
    "w2a2": (2, 2, 3000, 0.03),
}
#: Network, widths and method of each row, in the order of their worth.
_CASES = [
    ("resnet20", "fp32", "fp32"),
    ("resnet20", "w4a4", "lsq, distilled"),
    *(
        ("resnet20", "w8a8", f"ptq {how}")
        for how in ("max", "percentile", "mse", "entropy")
    ),
    *(("resnet20", widths, "ptq mse") for widths in _TRAINED if widths != "w8a8"),
    *(
        ("resnet20", widths, "lsq, distilled")
        for widths in ("w2a2", "w3a3", "w4a8", "w8a8")
    ),
    *(("resnet20", "w4a4", _SHORT + method) for method in _METHODS),
]


def with_training(options: argparse.Namespace, report: Reporter) -> None:
    """Report one line for each of the cases that is chosen, and each seed that matters."""
    key = ("network", "widths", "method", "seed", "images")
    done = finished_rows(options.out, *key)
    test = read_split(options.data, "test", options.images)
    data = read_split(options.data, "train", 128 if options.quick else 50_000)
    for seed in options.seeds:
        for network, widths, method in _CASES:
            draws = not method.startswith(("ptq", "fp32"))
            row = dict(
                zip(key, (network, widths, method, seed, options.images), strict=True)
            )
            if (seed and not draws) or tuple(row.values()) in done:
                continue
            if fnmatchcase(f"{network} {widths} {method}", options.only):
                model = resnet20(options.data).to(memory_format=torch.channels_last)
                how = _train(model, row, data, options) if method != "fp32" else {}
                share = round(100 * accuracy(logits(model, test), test), 2)
                report.value(**row, accuracy=share, **how)


def _train(
    model: nn.Module, row: dict[str, Any], data: Images, options: argparse.Namespace
) -> dict[str, Any]:
    """Quantize as a row says, in place, and train if it says so; return how."""
    batches = data.batches(_BATCH)[:16]
    widths, name = row["widths"], row["method"]
    if name.startswith("ptq"):
        torchq.fuse_(model, batches[0], progress=False)
        torchq.quantize_(model, _recipe(widths, learn=False))
        torchq.calibrate(model, batches, method=name.split()[1], progress=False)
        return {}
    _, _, steps, lr = _TRAINED[widths]
    teacher = copy.deepcopy(model)
    method = Method(loss="logits" if "dist" in name else "labels")
    if is_short := name.startswith(_SHORT):
        steps = _SHORT_STEPS
        lr = _SHORT_LR
        method = _METHODS[name.removeprefix(_SHORT)]
    steps = 1 if options.quick else round(steps * options.scale)
    prepare(
        model,
        batches,
        _recipe(widths, not is_short, method.per_channel),
        progress=False,
    )
    # The quantizers with few bits; those of the first and the last layer have 8.
    if is_short:
        for kind, how in (
            ("weight", method.weight_ranges),
            ("input", method.input_ranges),
        ):
            if how is not None:
                learn_ranges_(model, how, f"layer*.{kind}_quantizer")
    speed = method.input_range_speed
    training = Training(
        steps, lr, seed=row["seed"], input_range_lr=speed and speed * lr
    )
    student, twin = (_Autocast(m) if options.bf16 else m for m in (model, teacher))
    with Distillation(student, twin, temperature=4.0) as distillation:
        fit(
            model,
            data,
            training,
            student,
            None if method.loss == "labels" else distillation,
        )
    reestimate_bn_(model, batches, progress=False)
    torchq.fuse_(model, batches[0], progress=False)
    return {"steps": steps, "lr": lr, "bf16": options.bf16}


def _recipe(widths: str, learn: bool, per_channel: bool = True) -> torchq.QuantConfig:
    weight, activation, *_ = _TRAINED[widths]
    return torchq.recipes.integer(
        weight,
        activation,
        first_last=8,
        per_channel=per_channel,
        weight_method="max" if weight > 4 else "mse",
        learn_ranges=learn,
    )


class _Autocast(nn.Module):
    """A compiled module whose products have bfloat16 operands."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.compiled = torch.compile(module)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.compiled(x).float()


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each case."""
    options = parser(__doc__)
    options.add_argument(
        "--data", type=Path, required=True, help="folder with tars and weights"
    )
    options.add_argument("--images", type=int, default=10_000, help="test images")
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument(
        "--only", default="*", help="'NETWORK WIDTHS METHOD' with stars"
    )
    options.add_argument(
        "--scale", type=float, default=1.0, help="multiplies all steps"
    )
    fast = "train images compiled, with autocast to bfloat16"
    options.add_argument("--bf16", action="store_true", help=fast)
    chosen = parse(options, argv)
    if chosen.quick:
        chosen.images = 50
        chosen.seeds = chosen.seeds[:1]
    with Reporter("accuracy_qat", chosen.out) as report:
        with_training(chosen, report)


if __name__ == "__main__":
    main()
