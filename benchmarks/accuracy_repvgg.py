"""Accuracy of a trained RepVGG: quantizing its branches, its merged kernel, or both in training.

Rows, each with one range per output channel and with one per tensor, at 8 and at 4 bits:

- FP32, unfused and fused;
- PTQ of the branches one by one (quantized before fusing);
- PTQ of the fused network;
- QAT of the fused network, which has no BatchNorm any more;
- QAT of the branches under the equivalent kernel, fused afterwards.

Test images are kept out of calibration and training.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images, accuracy, arguments, logits, read_both, train
from benchmarks.harness import Reporter, parse
from benchmarks.repvgg import repvgg_cifar
from torchq.fusion import diagnose_ranges
from torchq.workflow import calibrate_weights

__all__ = ["main"]


_LEARNED = "w4a8 per channel, learned"


def _recipes() -> dict[str, torchq.QuantConfig]:
    def with_weights(weight: torchq.QuantDescriptor) -> torchq.QuantConfig:
        rule = torchq.Rule(
            "type:torch.nn.modules.conv.Conv2d", input=torchq.QuantDescriptor(), weight=weight
        )
        return torchq.recipes.int8().with_rules(rule)

    four = torchq.QuantDescriptor(4)
    return {
        "int8 per channel": torchq.recipes.int8(),
        "int8 per tensor": torchq.recipes.int8_per_tensor(),
        "w4a8 per channel": with_weights(four.replace(axis=0)),
        "w4a8 per tensor": with_weights(four),
        _LEARNED: with_weights(
            four.replace(axis=0, learn_amax=True, scale_range_grad=True, calib_method="mse")
        ),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each configuration."""
    options = arguments(__doc__, "repvgg.pt", train=10000)
    options.add_argument(
        "--qat",
        nargs="*",
        default=["int8 per tensor", _LEARNED],
        choices=list(_recipes()),
        help="recipes",
    )
    options.add_argument(
        "--lr",
        type=float,
        default=0.003,
        help="learning rate of QAT with branches, cosine to 0 (default: %(default)s)",
    )
    options.add_argument(
        "--lr-fused",
        type=float,
        default=0.001,
        help="the same of the fused network, where 0.01 diverges (default: %(default)s)",
    )
    chosen = parse(options, argv)
    test, data, calibration = read_both(chosen)
    with Reporter("accuracy_repvgg", chosen.out) as report:
        _run(report, repvgg_cifar(chosen.data), test, data, calibration, chosen)


def _run(
    report: Reporter,
    model: nn.Module,
    test: Images,
    data: Images,
    calibration: list[Tensor],
    options: argparse.Namespace,
) -> None:
    fused = copy.deepcopy(model)
    done = torchq.fuse_(fused, test.images[:4], progress=False)
    text = diagnose_ranges(model, calibration[0]).compare(diagnose_ranges(fused, calibration[0]))
    report.value(case="fp32", accuracy=_score(model, test))
    report.value(case="fp32 fused", accuracy=_score(fused, test), error=done.error, ranges=text)
    for name, config in _recipes().items():
        cases = {
            "PTQ before fusing": _ptq(model, config, calibration),
            "PTQ after fusing": _ptq(fused, config, calibration),
        }
        for case, quantized in cases.items():
            report.value(case=case, recipe=name, accuracy=_score(quantized, test))
        if options.steps and name in options.qat:
            trained = train(cases["PTQ after fusing"], data, options.steps, options.lr_fused)
            report.value(
                case="QAT after fusing",
                recipe=name,
                steps=options.steps,
                accuracy=_score(trained, test),
            )
            _equivalent(report, name, _branches(model, config, calibration), test, data, options)


def _equivalent(
    report: Reporter,
    name: str,
    model: nn.Module,
    test: Images,
    data: Images,
    options: argparse.Namespace,
) -> None:
    """Train the branches, the last fifth with frozen BatchNorm, then fuse."""

    def freeze(step: int) -> None:
        if step != options.steps * 4 // 5:
            return
        # The learning rate is small by now; without batch statistics a larger one diverges.
        torchq.qat.freeze_bn_(model)
        if name != _LEARNED:  # the kernels have moved with the statistics, learned ranges too
            calibrate_weights(model)

    trained = train(model, data, options.steps, options.lr, before=freeze)
    before = logits(trained, test)
    done = torchq.fuse_(trained, test.images[:4], progress=False)
    same = torch.equal(before, logits(trained, test))
    report.value(
        case="QAT of the equivalent kernel",
        recipe=name,
        steps=options.steps,
        accuracy=_score(trained, test),
        fused=len(done.fused),
        same_bits=same,
    )


def _score(model: nn.Module, test: Images) -> float:
    return round(accuracy(logits(model, test), test), 4)


def _ptq(model: nn.Module, config: torchq.QuantConfig, calibration: list[Tensor]) -> nn.Module:
    return _calibrated(model, config, calibration, torchq.quantize_)


def _branches(model: nn.Module, config: torchq.QuantConfig, calibration: list[Tensor]) -> nn.Module:
    return _calibrated(model, config, calibration, torchq.qat.quantize_branches_)


def _calibrated(
    model: nn.Module,
    config: torchq.QuantConfig,
    calibration: list[Tensor],
    quantize: Callable[..., object],
) -> nn.Module:
    quantized = copy.deepcopy(model)
    quantize(quantized, config)
    torchq.calibrate(quantized, calibration, method="entropy", progress=False)
    return quantized


if __name__ == "__main__":
    main()
