"""Does evaluation return what a default session of ONNX Runtime returns, and what does it cost?

For networks x recipes: the share of images whose outputs are those of the session to the last bit,
and to 1e-4 of the largest output, with the model as users have it: quantized for onnxruntime,
calibrated, in eval mode, without gradients. Networks that return what a float kernel computes,
such as a mean or a last convolution, can be equal to 1e-4 alone.

The time is that of a forward over the fused float model, on the same batches, in turns. The
networks are those of same_codes; ``--data`` has the trained weights of two of them.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.harness import Reporter, compare, finished_rows, parse, parser
from benchmarks.same_codes import RECIPES, images, networks
from torchq.graph import tensors_in
from torchq.runtime import open_session
from torchq.utils.text import table

_KEY = ("network", "recipe", "images")
_CLOSE = 1e-4


@torch.no_grad()
def figures(
    model: nn.Module, recipe: str, data: tuple[list[Tensor], list[Tensor]], rounds: int
) -> dict[str, float]:
    """Return the shares of equal images, and the time over float.

    Args:
        model: float and fused; it is left as it is.
        recipe: one of :data:`benchmarks.same_codes.RECIPES`.
        data: batches to calibrate with, and others to compare on.
        rounds: samples of the time.
    """
    calibration, test = data
    quantized = copy.deepcopy(model)
    example = calibration[0][:2]
    torchq.quantize_(
        quantized,
        RECIPES[recipe](),
        target="onnxruntime",
        example=example,
        progress=False,
    )
    torchq.calibrate(quantized, calibration, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torchq.export_onnx(quantized, example, path, dynamo=False, progress=False)
        session = open_session(path, optimize=True)
    equal: list[Tensor] = []
    close: list[Tensor] = []
    for batch in test:
        found = list(tensors_in(quantized(batch)))
        expected = session.run(session.feeds({"x": batch}))
        equal.append(_alike(found, expected, 0.0))
        close.append(_alike(found, expected, _CLOSE))
    first = test[0]
    candidates = {"float": lambda: model(first), "quantized": lambda: quantized(first)}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    _, timing = compare(
        candidates, baseline="float", rounds=rounds, warmup=2, clock=clock
    )
    return {
        "equal": torch.cat(equal).double().mean().item(),
        "close": torch.cat(close).double().mean().item(),
        "time": round(timing.ratio, 2),
    }


def _alike(
    found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> Tensor:
    """Return for each image if its outputs differ by no more than a share of the largest one."""
    are_alike = torch.ones(len(found[0]), dtype=torch.bool)
    for tensor, from_session in zip(found, expected, strict=True):
        allowed = tolerance * from_session.abs().max()
        are_alike &= ((tensor - from_session).abs() <= allowed).flatten(1).all(1)
    return are_alike


def main(argv: Sequence[str] | None = None) -> None:
    """Compare every network that ``--networks`` names, and print one table."""
    command = parser(__doc__)
    command.add_argument(
        "--data", type=Path, help="folder of the images and trained weights"
    )
    command.add_argument("--images", type=int, default=64, help="images to compare on")
    command.add_argument("--networks", nargs="*", help="these alone; default all")
    command.add_argument("--recipes", nargs="*", default=list(RECIPES))
    options = parse(command, argv)
    done = finished_rows(options.out, *_KEY)
    rows: list[list[Any]] = []
    with Reporter("evaluation", options.out, ["onnx", "onnxruntime"]) as report:
        for name, make, size in networks(options.data):
            recipes = [
                r for r in options.recipes if (name, r, options.images) not in done
            ]
            if (options.networks and name not in options.networks) or not recipes:
                continue
            data = images(options.data, size, options.images)
            model = make()
            torchq.fuse_(model, data[0][0][:2])
            for recipe in recipes:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    row = figures(model, recipe, data, options.rounds)
                report.value(network=name, recipe=recipe, images=options.images, **row)
                rows.append([name, recipe, *map(str, row.values())])
    print(table([("network", "recipe", "equal", "close", "time"), *rows]))


if __name__ == "__main__":
    main()
