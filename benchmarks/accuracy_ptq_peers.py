"""Accuracy of a trained ResNet-20 after the algorithms of other libraries, beside torchq's.

Every library gets the same float model with BatchNorm folded and the same training images without
labels. Weights have a range of each output channel, activations one range, unsigned behind ReLU
where the library can; the first and the last layer have 8 bits. Run this with the interpreter of an
environment that has the libraries; one that is not installed is left out, with the reason. With
``--out`` a run goes on after the rows that the file has already.
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

import torchq
from benchmarks.cifar import Images, accuracy, logits, read_split, resnet20, some_batches
from benchmarks.harness import Reporter, finished_rows, parse, parser

__all__ = ["main"]

_WIDTHS = ((8, 8), (4, 8), (4, 4))
_COUNT = 512
_ENDS = ("conv1", "linear")
# What tells one row from another.
_KEY = ("package", "algorithm", "seed", "widths", "images")


def _torchq(model: nn.Module, batches: list[Tensor], weight: int, input: int) -> nn.Module:
    torchq.quantize_(model, torchq.recipes.integer(weight, input, first_last=8))
    torchq.calibrate(model, batches, progress=False)
    return model


def _torchq_bias(model: nn.Module, batches: list[Tensor], weight: int, input: int) -> nn.Module:
    torchq.ptq.correct_bias_(_torchq(model, batches, weight, input), batches, progress=False)
    return model


def _torchq_gptq(model: nn.Module, batches: list[Tensor], weight: int, input: int) -> nn.Module:
    torchq.ptq.gptq_(_torchq(model, batches, weight, input), batches, progress=False)
    return model


def _nncf(model: nn.Module, batches: list[Tensor], weight: int, input: int) -> nn.Module:
    """Quantize an exported program, as NNCF's extension for modules needs a compiler."""
    nncf = import_module("nncf")
    if (weight, input) != (8, 8):
        raise NotImplementedError("nncf.quantize knows 8 bits for weights and activations")
    dimension = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (batches[0],), dynamic_shapes=({0: dimension},))
    quantized: nn.Module = nncf.quantize(
        program.module(),
        nncf.Dataset(batches),
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(batches),
    )
    return quantized


def _modelopt(algorithm: str) -> Any:
    """Return the function of one of ModelOpt's ways to calibrate."""

    def quantize(model: nn.Module, batches: list[Tensor], weight: int, input: int) -> nn.Module:
        mtq = import_module("modelopt.torch.quantization")
        rules: list[dict[str, Any]] = [
            {"quantizer_name": "*", "enable": False},
            *_modelopt_rules("*", weight, input, unsigned=True),
            *_modelopt_rules("linear.", 8, 8, unsigned=True),
            *_modelopt_rules("conv1.", 8, 8, unsigned=False),
        ]
        config = {"quant_cfg": rules, "algorithm": algorithm}
        quantized: nn.Module = mtq.quantize(model, config, lambda m: [m(x) for x in batches])
        return quantized

    return quantize


def _modelopt_rules(path: str, weight: int, input: int, unsigned: bool) -> list[dict[str, Any]]:
    weights = {"num_bits": weight, "axis": 0}
    inputs = {"num_bits": input, "axis": None, "unsigned": unsigned}
    return [
        {"quantizer_name": f"{path}weight_quantizer", "cfg": weights},
        {"quantizer_name": f"{path}input_quantizer", "cfg": inputs},
    ]


def _brevitas(rounding: str | None) -> Any:
    """Return the function of Brevitas.

    Args:
        rounding: ``"gptq"`` or ``"gpfq"``, its algorithms that round weights before its bias
            correction, or None for bias correction alone.
    """

    def quantize(model: nn.Module, batches: list[Tensor], weight: int, input: int) -> nn.Module:
        calibrate = import_module("brevitas.graph.calibrate")
        model = _with_brevitas_layers(model, weight, input).eval()
        model(batches[0])  # It makes the parameters of the scales.
        with calibrate.calibration_mode(model):
            for batch in batches:
                model(batch)
        if rounding is not None:
            mode = getattr(import_module(f"brevitas.graph.{rounding}"), f"{rounding}_mode")
            with mode(model, act_order=True, use_quant_activations=True) as algorithm:
                for _ in range(algorithm.num_layers):
                    for batch in batches:
                        algorithm.model(batch)
                    algorithm.update()
        with calibrate.bias_correction_mode(model):
            for batch in batches:
                model(batch)
        return model

    return quantize


def _with_brevitas_layers(model: nn.Module, weight: int, input: int) -> nn.Module:
    """Replace the layers by Brevitas' own, with weights by mean squared error."""
    layers, scaled = import_module("brevitas.nn"), import_module("brevitas.quant.scaled_int")
    replace = import_module("brevitas.graph.quantize").layerwise_quantize

    def arguments(weight: int, input: int, signed: bool) -> dict[str, Any]:
        quantizer = scaled.Int8ActPerTensorFloatMSE if signed else scaled.Uint8ActPerTensorFloatMSE
        return {
            "weight_quant": scaled.Int8WeightPerChannelFloatMSE,
            "weight_bit_width": weight,
            "input_quant": quantizer,
            "input_bit_width": input,
            "return_quant_tensor": False,
        }

    inner = [n for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    inner = [name for name in inner if name not in _ENDS]
    first: dict[type[nn.Module], Any]
    first = {nn.Conv2d: (layers.QuantConv2d, arguments(8, 8, signed=True))}
    first[nn.Linear] = (layers.QuantLinear, arguments(8, 8, signed=False))
    model = replace(model, compute_layer_map=first, name_blacklist=inner)
    rest = {nn.Conv2d: (layers.QuantConv2d, arguments(weight, input, signed=False))}
    done: nn.Module = replace(model, compute_layer_map=rest, name_blacklist=list(_ENDS))
    return done


Method = Callable[[nn.Module, list[Tensor], int, int], nn.Module]
# Package (None is this one) and algorithm -> what returns the quantized model.
_METHODS: dict[tuple[str | None, str], Method] = {
    (None, "calibrate"): _torchq,
    (None, "correct_bias_"): _torchq_bias,
    (None, "gptq_"): _torchq_gptq,
    ("nncf", "fast bias correction"): _nncf,
    ("nvidia-modelopt", "max"): _modelopt("max"),
    ("nvidia-modelopt", "mse"): _modelopt("mse"),
    ("brevitas", "bias correction"): _brevitas(None),
    ("brevitas", "GPTQ, bias correction"): _brevitas("gptq"),
    ("brevitas", "GPFQ, bias correction"): _brevitas("gpfq"),
}


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder with tars and weights")
    options.add_argument("--images", type=int, default=10_000, help="test images")
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    packages = sorted({package or "torchq" for package, _ in _METHODS})
    options.add_argument("--packages", nargs="+", default=packages, choices=packages)
    algorithms = list(dict.fromkeys(algorithm for _, algorithm in _METHODS))
    options.add_argument("--algorithms", nargs="+", default=algorithms, choices=algorithms)
    options.add_argument("--widths", nargs="+", default=[f"W{w}A{a}" for w, a in _WIDTHS])
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each library, algorithm, width and seed."""
    options = parse(_options(), argv)
    if options.quick:
        options.images, options.seeds = 50, options.seeds[:1]
    test = read_split(options.data, "test", options.images)
    pool = read_split(options.data, "train", 128 if options.quick else 4096).images
    model = resnet20(options.data)
    torchq.fuse_(model, test.images[:4])
    packages = list(dict.fromkeys(package for package, _ in _METHODS if package))
    done = finished_rows(options.out, *_KEY)
    with Reporter("accuracy_ptq_peers", options.out, packages=packages) as report:
        for seed in options.seeds:
            batches = some_batches(pool, _COUNT, seed)
            for (package, algorithm), method in _METHODS.items():
                name = package or "torchq"
                if name not in options.packages or algorithm not in options.algorithms:
                    continue
                for weight, input in _WIDTHS:
                    row = {"package": name, "algorithm": algorithm, "seed": seed}
                    row |= {"widths": f"W{weight}A{input}", "images": options.images}
                    if row["widths"] in options.widths and tuple(row.values()) not in done:
                        found = _measure(method, model, batches, (weight, input), test)
                        report.value(**row, **found)


def _measure(
    method: Method, model: nn.Module, batches: list[Tensor], widths: tuple[int, int], test: Images
) -> dict[str, Any]:
    """Return the accuracy and the seconds of process time, or why there are none."""
    start = time.process_time()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            quantized = method(copy.deepcopy(model), batches, *widths)
    except Exception as error:  # a library may refuse in any way
        return {"left_out": f"{type(error).__name__}: {error}"[:200]}
    seconds = round(time.process_time() - start, 1)
    found = round(accuracy(logits(quantized, test), test), 4)
    return {"accuracy": found, "process_seconds": seconds}


if __name__ == "__main__":
    main()
