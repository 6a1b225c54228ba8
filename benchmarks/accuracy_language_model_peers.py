"""Perplexity of a small language model after the algorithms of other libraries.

The model, the calibration pieces and the test pieces are those of accuracy_language_model.py, which
measures torchq: the head stays float, inputs have one range per tensor, weights a range of each
output channel or of 128 inputs. Run this with the interpreter of an environment that has the
libraries; one that is not installed, or that refuses, is left out, with the reason. With ``--out``
a run goes on after the rows that the file has already.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Reporter, finished_rows, parse, parser
from benchmarks.language_model import LENGTH, calibration_pieces, perplexity, trained_language_model

__all__ = ["main"]

_HEAD = "lm_head"
_GROUP = 128


def _modelopt(algorithm: str | dict[str, Any]) -> Any:
    """Return the function of one of ModelOpt's algorithms."""

    def quantize(model: nn.Module, batches: list[Tensor], weight: int, input: int | None) -> Any:
        mtq = import_module("modelopt.torch.quantization")
        groups = {"block_sizes": {-1: _GROUP, "type": "static"}} if input is None else {"axis": 0}
        rules: list[dict[str, Any]] = [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": weight, **groups}},
        ]
        if input is not None:
            cfg = {"num_bits": input, "axis": None}
            rules.append({"quantizer_name": "*input_quantizer", "cfg": cfg})
        rules.append({"quantizer_name": f"*{_HEAD}*", "enable": False})
        config = {"quant_cfg": rules, "algorithm": algorithm}
        return mtq.quantize(model, config, lambda m: [m(x) for x in batches])

    return quantize


def _nncf(**options: bool) -> Any:
    """Return the function of NNCF's compression of weights."""

    def quantize(model: nn.Module, batches: list[Tensor], weight: int, input: int | None) -> Any:
        nncf = import_module("nncf")
        program = torch.export.export(model, (batches[0],), dynamic_shapes=({0: _any_batch()},))
        return nncf.compress_weights(
            program.module(),
            mode=nncf.CompressWeightsMode.INT4_SYM,
            group_size=_GROUP,
            all_layers=False,
            dataset=nncf.Dataset(batches),
            subset_size=len(batches),
            **options,
        )

    return quantize


def _any_batch() -> Any:
    return torch.export.Dim("batch", min=2)


Method = Callable[[nn.Module, list[Tensor], int, int | None], nn.Module]
_WEIGHTS, _W8A8, _W4A8 = (4, None), (8, 8), (4, 8)
# Package and algorithm -> what returns the quantized model, and the bits of weights and inputs.
_METHODS: dict[tuple[str, str], tuple[Method, tuple[tuple[int, int | None], ...]]] = {
    ("nvidia-modelopt", "max"): (_modelopt("max"), (_WEIGHTS, _W8A8, _W4A8)),
    ("nvidia-modelopt", "SmoothQuant"): (
        _modelopt({"method": "smoothquant", "alpha": 0.5}),
        (_W8A8, _W4A8),
    ),
    ("nvidia-modelopt", "AWQ, scales"): (_modelopt("awq_lite"), (_WEIGHTS,)),
    ("nvidia-modelopt", "AWQ, scales and ranges"): (_modelopt("awq_full"), (_WEIGHTS,)),
    ("nvidia-modelopt", "GPTQ"): (_modelopt("gptq"), (_WEIGHTS,)),
    ("nncf", "nearest"): (_nncf(), (_WEIGHTS,)),
    ("nncf", "AWQ"): (_nncf(awq=True), (_WEIGHTS,)),
    ("nncf", "scale estimation"): (_nncf(scale_estimation=True), (_WEIGHTS,)),
    ("nncf", "GPTQ"): (_nncf(gptq=True), (_WEIGHTS,)),
}


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--work", type=Path, required=True, help="folder for the weights")
    options.add_argument("--steps", type=int, default=800, help="of training, if there are none")
    options.add_argument("--pieces", type=int, default=200, help="of 128 bytes, of the test text")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    packages = sorted({package for package, _ in _METHODS})
    options.add_argument("--packages", nargs="+", default=packages, choices=packages)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each library, algorithm, width and seed."""
    options = parse(_options(), argv)
    if options.quick:
        options.steps, options.pieces, options.seeds = 2, 4, options.seeds[:1]
    model, text = trained_language_model(options.work, options.steps)
    test = text.test_pieces(options.pieces, LENGTH)
    packages = sorted({package for package, _ in _METHODS})
    done = finished_rows(options.out, "package", "algorithm", "widths", "seed")
    name = "accuracy_language_model_peers"
    with Reporter(name, options.out, packages=packages) as report:
        for seed in options.seeds:
            batches = calibration_pieces(text, seed, 2 if options.quick else 6)
            for (package, algorithm), (method, cases) in _METHODS.items():
                for bits in cases if package in options.packages else ():
                    row = {"package": package, "algorithm": algorithm}
                    row |= {"widths": _name(*bits), "seed": seed}
                    if tuple(row.values()) not in done:
                        report.value(**row, **_measure(method, model, batches, bits, test))


def _name(weight: int, input: int | None) -> str:
    return f"W{weight} group {_GROUP}" if input is None else f"W{weight}A{input}"


def _measure(
    method: Method,
    model: nn.Module,
    batches: list[Tensor],
    bits: tuple[int, int | None],
    test: Tensor,
) -> dict[str, Any]:
    """Return the perplexity and the seconds of process time, or why there are none."""
    start = time.process_time()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            quantized = method(copy.deepcopy(model), batches, *bits)
            seconds = round(time.process_time() - start, 1)
            found = round(perplexity(quantized, test), 4)
    except Exception as error:  # a library may refuse in any way
        return {"left_out": f"{type(error).__name__}: {error}"[:200]}
    return {"perplexity": found, "process_seconds": seconds}


if __name__ == "__main__":
    main()
