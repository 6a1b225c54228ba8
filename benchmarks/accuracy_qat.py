"""Accuracy after quantization-aware training: networks, widths and methods beside FP32 and PTQ.

Networks: the CIFAR ResNet-20 and the RepVGG whose weights lie in ``--data``, a depthwise network
and a language model of LSTM layers that the program trains itself and keeps in ``--work``. The
first and the last layer have 8 bits. Images of the test are never seen before the test; figures
of images are accuracies (higher is better), those of text are perplexities per byte (lower is
better).

Training keeps BatchNorm and folds it afterwards; the figure is that of the folded network. Each
case runs once for each seed. A case that ``--out`` holds already is left out, and a run that is
stopped continues at its last checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images, accuracy, logits, read_split, resnet20
from benchmarks.harness import Reporter, parse, parser
from benchmarks.qat_methods import METHODS, SHORT, Method, learn_, train_
from benchmarks.qat_networks import (
    LanguageModel,
    Text,
    depthwise,
    kept,
    read_text,
    train_depthwise,
    train_language_model,
)
from benchmarks.qat_training import Training, fit
from benchmarks.repvgg import repvgg_cifar
from torchq.qat import (
    Distillation,
    prepare,
    reestimate_bn_,
)

__all__ = ["main"]

#: Name -> bits of weights and activations, steps of training, and learning rate.
_WIDTHS = {
    "w8a8": (8, 8, 300, 0.003),
    "w4a8": (4, 8, 600, 0.01),
    "w4a4": (4, 4, 1000, 0.01),
    "w3a3": (3, 3, 1500, 0.02),
    "w2a2": (2, 2, 3000, 0.03),
}
#: Test images where a row does not say.
_IMAGES = 10000
#: What the names of methods begin with that are compared with one another.
_SHORT = "short: "
_CALIBRATORS = ("max", "percentile", "mse", "entropy", "lp")


@dataclass(frozen=True)
class Case:
    """One row: a network, widths of its weights and activations, and what is done to it."""

    network: str
    widths: str
    method: str
    seed: int = 0

    @property
    def is_short(self) -> bool:
        """Return True for one of the methods that are compared with one another."""
        return self.method.startswith(_SHORT)

    def key(self) -> dict[str, object]:
        """Return what tells this row from others in the file of results."""
        return vars(self)


#: The rows in the order of their worth.
_CASES = [
    Case("repvgg", "w4a8", "ptq gptq_"),
    *(Case("resnet20", widths, "ptq gptq_") for widths in ("w4a4", "w2a2", "w3a3", "w4a8")),
    Case("resnet20", "w4a4", "lsq, distilled"),
    *(Case("resnet20", "w8a8", f"ptq {calibrator}") for calibrator in _CALIBRATORS),
    *(Case("resnet20", widths, "ptq mse") for widths in _WIDTHS if widths != "w8a8"),
    Case("repvgg", "w4a8", "ptq mse"),
    Case("depthwise", "w4a4", "ptq mse"),
    Case("depthwise", "w4a4", "lsq, distilled"),
    Case("resnet20", "w2a2", "lsq, distilled"),
    Case("resnet20", "w3a3", "lsq, distilled"),
    Case("resnet20", "w4a8", "lsq, distilled"),
    Case("resnet20", "w8a8", "lsq, distilled"),
    Case("resnet20", "w4a4", "lsq"),
    *(Case("language model", widths, "ptq max") for widths in ("w8a8", "w4a8")),
    *(Case("language model", widths, "qat, distilled") for widths in ("w8a8", "w4a8")),
    *(Case("resnet20", "w4a4", _SHORT + method) for method in METHODS),
]


class Bench:
    """The data, the float networks, and the figures of one run of the program."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._networks: dict[str, nn.Module] = {}

    @cached_property
    def test(self) -> Images:
        """Return the images of the test."""
        return read_split(self.options.data, "test", self.options.images)

    @cached_property
    def train(self) -> Images:
        """Return the images of training and calibration."""
        return read_split(self.options.data, "train", self.options.train)

    def float_network(self, name: str) -> nn.Module:
        """Return a trained network, in eval mode."""
        if name not in self._networks:
            self._networks[name] = self._make(name)
        return self._networks[name]

    def _make(self, name: str) -> nn.Module:
        options = self.options
        if name == "resnet20":
            return resnet20(options.data)
        if name == "repvgg":
            return repvgg_cifar(options.data)
        path = options.work / f"{name.replace(' ', '_')}.pt"
        if name == "language model":
            steps = options.float_steps // 2
            return kept(path, LanguageModel(), lambda: train_language_model(self.text, steps))
        return kept(path, depthwise(), lambda: train_depthwise(self.train, options.float_steps))

    @cached_property
    def text(self) -> Text:
        """Return the text of the language model."""
        return read_text()

    def score(self, model: nn.Module) -> float:
        """Return the accuracy in percent, or the perplexity of a language model."""
        if isinstance(model, LanguageModel):
            return round(_perplexity(model, self.text.test_pieces(self.options.images // 20)), 4)
        return round(100 * accuracy(logits(model, self.test), self.test), 2)

    def run(self, case: Case) -> dict[str, object]:
        """Return the figures of one case."""
        model = copy.deepcopy(self.float_network(case.network))
        if isinstance(model, LanguageModel):
            return self._run_language_model(model, case)
        model = model.to(memory_format=torch.channels_last)
        batches = self.train.batches(64)[: max(1, self.options.calibration // 64)]
        if case.method == "ptq gptq_":
            return {"accuracy": self.score(self.after_gptq(case))}
        if case.method.startswith("ptq"):
            _quantize_after(model, case, batches)
            return {"accuracy": self.score(model)}
        found = self._train(model, case, batches)
        torchq.fuse_(model.eval(), batches[0], progress=False)
        return {"accuracy": self.score(model), **found}

    def after_gptq(self, case: Case) -> nn.Module:
        """Return the fused network of a case as ``torchq.ptq.gptq_`` rounds it; kept in a file."""
        path = self.options.work / f"{case.network}_{case.widths}_gptq.pt"
        model = copy.deepcopy(self.float_network(case.network))
        batches = self.train.batches(64)[: max(1, self.options.calibration // 64)]
        if path.exists():
            torchq.load(model, path)
            return model
        torchq.fuse_(model, batches[0], progress=False)
        torchq.quantize_(model, _recipe(case, learn=False))
        torchq.calibrate(model, batches, progress=False)
        torchq.ptq.gptq_(model, batches)
        path.parent.mkdir(parents=True, exist_ok=True)
        torchq.save(model, path)
        return model

    def _run_language_model(self, model: nn.Module, case: Case) -> dict[str, object]:
        text, generator = self.text, torch.Generator().manual_seed(case.seed)
        batches = [text.batch(generator)[:, :-1] for _ in range(8)]
        weight, activation, *_ = _WIDTHS[case.widths]
        bits = torchq.QuantDescriptor(weight, axis=0)
        rule = torchq.Rule("lstm", input=torchq.QuantDescriptor(activation), weight=bits)
        teacher, config = copy.deepcopy(model), torchq.recipes.int8().with_rules(rule)
        prepare(model, batches, config, progress=False)
        if case.method.startswith("ptq"):
            return {"perplexity": self.score(model.eval())}
        steps, lr = 1 if self.options.quick else round(400 * self.options.scale), 3e-4
        with Distillation(model, teacher) as distillation:

            def loss(generator: torch.Generator) -> Tensor:
                model(text.batch(generator)[:, :-1])
                return distillation.loss()

            plan = Training(steps, lr, optimizer="adam", clip=1.0, seed=case.seed)
            fit(model, loss, plan, label=str(case), checkpoint=self._checkpoint(case, plan))
        return {"perplexity": self.score(model), "steps": steps, "lr": lr}

    def _train(self, model: nn.Module, case: Case, batches: list[Tensor]) -> dict[str, object]:
        """Train as the case says; return how."""
        method, options = _method(case), self.options
        _, _, steps, lr = _WIDTHS[case.widths]
        steps, lr = SHORT if case.is_short else (steps, lr)
        steps = 1 if options.quick else round(steps * options.scale)
        teacher = copy.deepcopy(model).eval()
        _prepare(model, case, method, batches)
        plan = Training(
            steps,
            lr,
            seed=case.seed,
            input_range_lr=None if method.input_range_lr is None else lr * method.input_range_lr,
        )
        train_(
            model,
            teacher,
            self.train,
            method,
            plan,
            bf16=options.bf16,
            label=str(case),
            checkpoint=self._checkpoint(case, plan),
        )
        reestimate_bn_(model, batches, progress=False)
        return {"steps": steps, "lr": lr, "bf16": options.bf16}

    def _checkpoint(self, case: Case, plan: Training) -> Path:
        """Return the file that keeps the state of a run."""
        self.options.work.mkdir(parents=True, exist_ok=True)
        text = "_".join(map(str, (*vars(case).values(), plan.steps))).replace(" ", "")
        return self.options.work / f"{text}.run"


@torch.no_grad()
def _perplexity(model: nn.Module, pieces: Tensor) -> float:
    """Return the perplexity per byte of the second half of each piece, which has a context."""
    half, losses = pieces.shape[1] // 2, []
    for part in pieces.split(50):
        found = model(part[:, :-1])[:, half:].transpose(1, 2)
        losses.append(nn.functional.cross_entropy(found, part[:, half + 1 :], reduction="none"))
    return torch.cat(losses).mean().exp().item()


def _recipe(case: Case, learn: bool, per_channel: bool = True) -> torchq.QuantConfig:
    weight, activation, *_ = _WIDTHS[case.widths]
    method = "max" if weight > 4 else "mse"
    return torchq.recipes.integer(
        weight,
        activation,
        first_last=8,
        per_channel=per_channel,
        weight_method=method,
        learn_ranges=learn,
    )


def _method(case: Case) -> Method:
    """Return how a case trains."""
    if case.is_short:
        return METHODS[case.method.removeprefix(_SHORT)]
    return Method(loss="logits" if "distilled" in case.method else "labels")


def _prepare(model: nn.Module, case: Case, method: Method, batches: list[Tensor]) -> None:
    """Quantize, calibrate, and let the ranges learn."""
    recipe = _recipe(case, not case.is_short, method.per_channel)
    prepare(model, batches, recipe, progress=False)
    if case.is_short:
        learn_(model, method)


def _quantize_after(model: nn.Module, case: Case, batches: list[Tensor]) -> None:
    """Fuse, quantize and calibrate without training."""
    torchq.fuse_(model, batches[0], progress=False)
    torchq.quantize_(model, _recipe(case, learn=False))
    torchq.calibrate(model, batches, method=case.method.split()[1], progress=False)


def _done(out: Path | None) -> list[dict[str, object]]:
    """Return the rows of an earlier run."""
    if out is None or not out.exists():
        return []
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def _chosen(options: argparse.Namespace) -> Iterator[Case]:
    done = _done(options.out)
    for seed in range(options.seeds):
        for case in _CASES:
            known = Case(case.network, case.widths, case.method, seed)
            if seed and case.method.startswith("ptq"):
                continue  # Nothing is drawn there.
            text = f"{known.network} {known.widths} {known.method}"
            if not fnmatchcase(text, options.only):
                continue
            same = [r for r in done if r.get("images", _IMAGES) == options.images]
            if not any(known.key().items() <= row.items() for row in same):
                yield known


def _arguments() -> argparse.ArgumentParser:
    options = parser(__doc__)
    folder = "folder with resnet20.pt, repvgg.pt and the tars of images"
    options.add_argument("--data", type=Path, required=True, help=folder)
    options.add_argument(
        "--work", type=Path, required=True, help="folder for networks that are trained here"
    )
    options.add_argument("--images", type=int, default=_IMAGES, help="test images")
    options.add_argument("--train", type=int, default=50000, help="training images")
    options.add_argument("--calibration", type=int, default=1024, help="images to calibrate on")
    options.add_argument("--float-steps", type=int, default=6000, help="of the depthwise network")
    options.add_argument("--scale", type=float, default=1.0, help="multiplies all steps of QAT")
    options.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ... of the batches")
    fast = "train images compiled, with autocast to bfloat16"
    options.add_argument("--bf16", action="store_true", help=fast)
    options.add_argument("--only", default="*", help="run the cases whose text matches this")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each case that is left to do."""
    options = parse(_arguments(), argv)
    if options.quick:
        options.images, options.train, options.calibration, options.float_steps = 50, 128, 64, 1
    bench = Bench(options)
    done = _done(options.out)
    with Reporter("accuracy_qat", options.out) as report:
        for case in _chosen(options):
            if not any(
                r.get("network") == case.network and r.get("method") == "fp32" for r in done
            ):
                figure = bench.score(bench.float_network(case.network))
                done.append({"network": case.network, "method": "fp32"})
                name = "perplexity" if case.network == "language model" else "accuracy"
                row = {"network": case.network, "widths": "fp32", "method": "fp32", name: figure}
                report.value(**row, images=options.images)
            report.value(**case.key(), images=options.images, **bench.run(case))


if __name__ == "__main__":
    main()
