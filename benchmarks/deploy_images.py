"""Networks that are trained on CIFAR-10, on every engine, beside their simulations.

A network in INT8 and W4A4 is compared with its simulation; on the emulator of a Snapdragon
(``--planned qnn``, which takes .15 s an image) in INT8 and with activations of 16 bits
(``--recipes int8 w8a16``). For ONNX Runtime the engine "file" is the exported file in a session as
users open it. ``equal`` is the share of images whose outputs are those of the simulation to the
last bit; ``--keep`` keeps operators on integers that calibration would leave in float.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import (
    Images,
    accuracy,
    logits,
    read_split,
    repvgg_cifar,
    resnet20,
)
from benchmarks.harness import Reporter, decibels, parse, parser
from torchq.errors import MissingExtraError
from torchq.lowering.kernel import saturates
from torchq.runtime import open_session

#: Runtime that a network is quantized for -> the engines that run it.
_ENGINES: dict[str | None, tuple[str, ...]] = {
    None: ("torch",),
    "onnxruntime": ("torch", "onnxruntime"),
    "openvino": ("torch", "openvino"),
    "qnn": ("qnn",),
}
_BATCH = 50
_NETWORKS = {"resnet20": resnet20, "repvgg": repvgg_cifar}


def _config(recipe: str, narrow: bool, keep: bool) -> torchq.QuantConfig:
    """Return a recipe, whose widest weights have 7 bits where kernels add products in 16 bits."""
    if recipe == "w4a4":
        return torchq.recipes.w4a4(first_last=7 if narrow else 8)
    if recipe == "w8a16":
        return torchq.recipes.w8a16()
    config = torchq.recipes.int8(reduce_range=narrow)
    # A rule that names an operator keeps it.
    kept = torchq.Rule("*quant_*", input=config.rules[0].input)
    return config.with_rules(kept) if keep else config


def quantized_for(
    model: nn.Module,
    target: str | None,
    batches: list[Tensor],
    config: torchq.QuantConfig | None = None,
) -> nn.Module:
    quantized = copy.deepcopy(model)
    example = batches[0][:1] if target else None
    torchq.quantize_(quantized, config, target=target, example=example)
    torchq.calibrate(quantized, batches, progress=False)
    return quantized


def engines(
    options: argparse.Namespace, model: nn.Module, test: Images, batches: list[Tensor]
) -> None:
    """Report one line for each recipe, runtime of the plan, and engine."""
    packages = ["onnxruntime", "openvino"]
    with Reporter("accuracy_deploy", options.out, packages) as report:
        case = {"network": options.network, "images": len(test.labels)}
        report.value(
            **case, engine="fp32", accuracy=accuracy(logits(model, test), test)
        )
        for recipe in options.recipes:
            for target in options.planned:
                # On such CPUs ONNX Runtime alone has kernels for weights of 8 bits.
                narrow = saturates() and target not in ("onnxruntime", "qnn")
                names = _ENGINES[target] if narrow or not saturates() else (target,)
                names = (*names, *(["file"] if target == "onnxruntime" else []))
                config = _config(recipe, narrow, options.keep)
                quantized = quantized_for(model, target, batches, config)
                for name, fields in _agreements(quantized, test, names):
                    planned = {"recipe": recipe, "planned_for": target}
                    planned["keep"] = options.keep
                    report.value(**case, **planned, engine=name, **fields)


def _agreements(
    simulated: nn.Module, test: Images, names: Sequence[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield figures of the simulation and of each engine."""
    plain = logits(simulated, test)

    def fields(result: Tensor) -> dict[str, float]:
        return {
            "accuracy": accuracy(result, test),
            "same_class": _same_class(result, plain),
            "to_simulation_db": decibels(result, plain),
            "equal": float((result == plain).all(1).double().mean()),
        }

    yield "simulation", fields(plain)
    for name in names:
        if name == "file":
            yield name, fields(_in_session(simulated, test))
            continue
        try:
            # A chip takes one shape, and its compiler takes minutes for large batches.
            size = 1 if name == "qnn" else _BATCH
            deployed = torchq.deploy(simulated, test.images[:size], target=name)
        except MissingExtraError as error:
            print(f"# {error}", flush=True)
            continue
        yield name, fields(logits(deployed, test, size))


def _in_session(model: nn.Module, test: Images) -> Tensor:
    """Return the logits of the exported file in a default session of ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        example = test.images[:2]
        torchq.export_onnx(model, example, path, dynamo=False, progress=False)
        session = open_session(path, optimize=True)
    batches = test.batches(_BATCH)
    return torch.cat([session.run(session.feeds({"x": x}))[0] for x in batches])


def _same_class(found: Tensor, expected: Tensor) -> float:
    return float((found.argmax(1) == expected.argmax(1)).float().mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each recipe, runtime of the plan, and engine."""
    arguments = parser(__doc__)
    arguments.add_argument("--network", choices=_NETWORKS, default="resnet20")
    arguments.add_argument(
        "--recipes",
        nargs="*",
        choices=("int8", "w4a4", "w8a16"),
        default=["int8", "w4a4"],
    )
    runtimes = [name for name in _ENGINES if name is not None]
    arguments.add_argument(
        "--planned",
        nargs="*",
        choices=runtimes,
        default=[name for name in _ENGINES if name != "qnn"],
        help="default all but qnn",
    )
    folder = "folder with the trained weights and the tars of images"
    arguments.add_argument("--data", type=Path, required=True, help=folder)
    arguments.add_argument("--images", type=int, default=10_000, help="of the test")
    arguments.add_argument("--calibration", type=int, default=500, help="images")
    arguments.add_argument(
        "--keep", action="store_true", help="keep all operators on integers"
    )
    options = parse(arguments, argv)
    test = read_split(options.data, "test", _BATCH if options.quick else options.images)
    count = _BATCH if options.quick else options.calibration
    batches = read_split(options.data, "train", count).batches(_BATCH)
    model = _NETWORKS[options.network](options.data)
    torchq.fuse_(model, test.images[:4])
    engines(options, model, test, batches)


if __name__ == "__main__":
    main()
