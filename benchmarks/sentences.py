"""Is a MiniLM for OpenVINO as good and as fast as NNCF's?

The MiniLM of benchmarks/linear_factors.py, quantized for OpenVINO with attention in modules, beside
NNCF's quantizer with the model type "transformer": on 1,200 sentences, for several draws of 128
others to calibrate on, the share whose nearest neighbour is that of the float network, and the
ratio of signal to noise. Then both files take one input of 384 tokens in turn, on one thread: the
median of the ratios of their times. Draws that ``--out`` has already are left out.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchq
from benchmarks.harness import Reporter, finished_rows, parse, parser
from benchmarks.linear_factors import (
    Compiled,
    Task,
    compiled_by_nncf,
    figures,
    sentences,
)

_COUNT = 1200
_ROUNDS = 25


def compiled_by_torchq(task: Task, example: Mapping[str, Tensor]) -> Any:
    """Return OpenVINO's session of the file that torchq writes."""
    openvino = importlib.import_module("openvino")
    model = copy.deepcopy(task.model).eval()
    first = task.batches[0]
    torchq.hugging_face.attend_in_modules_(model, first)
    torchq.quantize_(model, target="openvino", example=first, progress=False)
    torchq.calibrate(model, task.batches, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torchq.export_onnx(model, dict(example), path, progress=False)
        return openvino.compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 1})


def of_length(task: Task, tokens: int) -> dict[str, Tensor]:
    """Return one input of so many tokens, none of them masked."""
    repeated = {
        name: torch.cat([tensor] * tokens, 1)[:1, :tokens].contiguous()
        for name, tensor in task.batches[0].items()
    }
    repeated["attention_mask"] = torch.ones_like(repeated["attention_mask"])
    return repeated


def ratio_of_times(one: Any, other: Any, example: Mapping[str, Tensor]) -> float:
    """Return the median of the ratios of processor times of calls in turn."""
    arrays = {name: tensor.numpy() for name, tensor in example.items()}

    def seconds(compiled: Any) -> float:
        names = {port.any_name for port in compiled.inputs}
        fed = {name: array for name, array in arrays.items() if name in names}
        start = time.process_time()
        compiled(fed)
        return time.process_time() - start

    ratios = [seconds(one) / seconds(other) for _ in range(_ROUNDS)]
    return statistics.median(ratios)


def main(argv: list[str] | None = None) -> None:
    """Run the draws that are missing."""
    described = parser(__doc__)
    described.add_argument("--minilm", type=Path, help="folder of the weights")
    described.add_argument("--tokens", type=int, default=384)
    described.add_argument("--draws", type=int, default=5)
    options: argparse.Namespace = parse(described, argv)
    warnings.simplefilter("ignore")
    done = finished_rows(options.out, "draw")
    with Reporter("sentences", options.out, ("openvino", "nncf")) as reporter:
        for draw in range(options.draws):
            if (draw,) in done:
                continue
            task = sentences(options, draw, _COUNT)
            if task is None:
                print("left out: the weights or transformers are missing")
                return
            example = of_length(task, options.tokens)
            own = compiled_by_torchq(task, example)
            peer = compiled_by_nncf(task)
            near = {
                f"{name}_{key}": value
                for name, compiled in (("torchq", own), ("nncf", peer))
                for key, value in figures(task, Compiled(compiled)).items()
            }
            ratio = ratio_of_times(own, peer, example)
            reporter.value(
                draw=draw, tokens=options.tokens, time=round(ratio, 3), **near
            )


if __name__ == "__main__":
    main()
