"""Count which ONNX files `torchq.from_onnx` reads, and whether they compute what they should.

The cases are those that the package onnx ships: 1,884 of single nodes (in onnx 1.23), the models
and operators that PyTorch exported years ago, and the light networks, which are compared with ONNX
Runtime. Then every classifier of torchvision is exported with both exporters of torch, read again,
and compared with itself; the figure is the largest error divided by the largest output. Weights
are random and inputs small. Each classifier runs in a process of its own with a time limit.

One line for each section counts its cases; another line names each case that is wrong.

Example:
    python -m benchmarks.conformance_onnx --out benchmarks/results/conformance_onnx.jsonl
    python -m benchmarks.conformance_onnx node light
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchq
from benchmarks.harness import Reporter
from torchq.errors import FrontendError
from torchq.frontends.onnx.reader import tensor_of

OUTCOMES = ("right", "refused", "wrong", "not run")

Row = dict[str, Any]
PEERS = ("onnx", "onnxruntime", "torchvision", "onnxscript")
EXPORTERS = {"torchscript": False, "dynamo": True}
LIMIT = 1e-4  # of the error relative to the largest output
#: Image sizes of networks that do not accept 64 x 64. The pooling of AlexNet and VGG would make
#: more windows than there are pixels, which the older exporter cannot write.
SIZES = {"inception_v3": 96, "maxvit_t": 224, "vit_h_14": 56, "alexnet": 224}
SIZES |= {f"vgg{depth}{end}": 224 for depth in (11, 13, 16, 19) for end in ("", "_bn")}
#: Cases whose expected values come from NumPy's transforms in float32: some should be 0 and are off
#: by rounding.
NOISY = {"test_dft_inverse": 1e-5, "test_dft_inverse_opset19": 1e-5}
# Two units in the last place.
HALF_PRECISION = {
    torch.float16: 2.0**-9,
    torch.bfloat16: 2.0**-6,
}


def as_tensor(value: Any) -> Tensor:
    """Return an array or message of a case as a tensor."""
    if hasattr(value, "data_type"):
        return tensor_of(value, None, "case")
    if isinstance(value, Tensor):
        return value
    array = np.array(value)
    if array.dtype.name.startswith(("bfloat16", "float8_")) and hasattr(
        torch, array.dtype.name
    ):
        bits = array.view(f"int{8 * array.dtype.itemsize}")
        return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def difference(got: Tensor, expected: Any, rtol: float, atol: float) -> str:
    """Return how an output differs from the expected one, "" where it does not."""
    reference = as_tensor(expected)
    if got.shape != reference.shape or got.dtype != reference.dtype:
        return f"{got.dtype} {tuple(got.shape)} for {reference.dtype} {tuple(reference.shape)}"
    rtol = max(rtol, HALF_PRECISION.get(got.dtype, 0.0))
    if torch.allclose(got.double(), reference.double(), rtol, atol, equal_nan=True):
        return ""
    return f"largest error {(got.double() - reference.double()).abs().max():.3g}"


def outcome(source: Any, data: Iterable[Any], rtol: float, atol: float) -> Row:
    """Return what became of one file: right, refused or wrong, and why."""
    try:
        model = torchq.from_onnx(source)
    except FrontendError as error:
        folder = f"{source.parents[2]}/" if isinstance(source, Path) else ""
        return {"outcome": "refused", "reason": str(error).replace(folder, "")[:200]}
    except Exception as error:  # anything else is a defect, which the table shows
        return {"outcome": "wrong", "reason": f"{type(error).__name__}: {error}"[:200]}
    try:
        for inputs, outputs in data:
            with torch.no_grad():
                results = model(
                    *[as_tensor(value) for value in inputs[: len(model.input_names)]]
                )
            results = results if isinstance(results, tuple) else (results,)
            for got, expected in zip(results, outputs, strict=True):
                difference_text = difference(got, expected, rtol, atol)
                if difference_text:
                    return {"outcome": "wrong", "reason": difference_text}
    except Exception as error:  # the same
        return {"outcome": "wrong", "reason": f"{type(error).__name__}: {error}"[:200]}
    return {"outcome": "right"}


def cases() -> dict[str, Any]:
    """Return the cases of a single node by name."""
    with warnings.catch_warnings():
        # The cases are made by code that overflows on purpose.
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return {case.name: case for case in collect_testcases(None)}


def outcome_of(case: Any) -> Row:
    """Return what became of one case of a single node."""
    return outcome(
        case.model, case.data_sets, case.rtol, NOISY.get(case.name, case.atol)
    )


def node_cases() -> Iterator[Row]:
    """Yield the outcome of each case of a single node."""
    for name, case in cases().items():
        yield {"section": "node", "name": name} | outcome_of(case)


def stored_models(kind: str) -> Iterator[Row]:
    """Yield the outcome of each model in a folder of the package onnx."""
    import onnx

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / kind
    for path in sorted(folder.iterdir()):
        sets = sorted(path.glob("test_data_set_*"))
        data = (
            tuple(_stored(entry, part) for part in ("input", "output"))
            for entry in sets
        )
        yield {"section": kind, "name": path.name} | outcome(
            path / "model.onnx", data, 1e-3, 1e-5
        )


def _stored(folder: Path, part: str) -> list[Tensor]:
    import onnx

    paths = sorted(
        folder.glob(f"{part}_*.pb"), key=lambda path: int(path.stem.split("_")[-1])
    )
    return [as_tensor(onnx.TensorProto.FromString(path.read_bytes())) for path in paths]


def light_networks(names: str = "*") -> Iterator[Row]:
    """Yield the outcome of light networks against ONNX Runtime; their weights are all one number.

    ``names`` is a pattern of their files' names.
    """
    import onnx
    import onnxruntime

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in sorted(folder.glob(f"{names}.onnx")):
        session = onnxruntime.InferenceSession(
            str(path), providers=["CPUExecutionProvider"]
        )
        model = torchq.from_onnx(path)
        (name,) = model.input_names
        shape = next(
            argument.shape for argument in session.get_inputs() if argument.name == name
        )
        x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            got = model(x)
            reference = torch.from_numpy(session.run(None, {name: x.numpy()})[0])
        error = float((got - reference).abs().max() / reference.abs().max())
        verdict = "right" if error <= LIMIT else "wrong"
        yield {
            "section": "light",
            "name": path.stem,
            "outcome": verdict,
            "error": error,
        }


def network(name: str) -> tuple[nn.Module, Tensor]:
    """Return a classifier with random weights and statistics, and an image."""
    import torchvision

    size = SIZES.get(name, 64)
    torch.manual_seed(0)
    options: dict[str, Any] = {"image_size": size} if name.startswith("vit") else {}
    if name in ("googlenet", "inception_v3"):
        options = {"init_weights": False}
    model = torchvision.models.get_model(name, weights=None, **options).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
        if isinstance(module, nn.Linear) and not module.weight.any():
            # The heads of vision transformers are zero.
            nn.init.normal_(module.weight, std=0.02)
    return model, torch.randn(1, 3, size, size)


def exported(name: str) -> Iterator[Row]:
    """Yield how well a classifier comes back from the files of both exporters."""
    model, x = network(name)
    with torch.no_grad():
        reference = model(x)
    for exporter, dynamo in EXPORTERS.items():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older exporter warns of its age
            path = Path(folder) / "model.onnx"
            quiet = {"verbose": False} if dynamo else {}
            torch.onnx.export(model, (x,), str(path), dynamo=dynamo, **quiet)
            imported = torchq.from_onnx(path)
            with torch.no_grad():
                error = float(
                    (imported(x) - reference).abs().max() / reference.abs().max()
                )
        verdict = "right" if error <= LIMIT else "wrong"
        yield {"section": exporter, "name": name, "outcome": verdict, "error": error}


def classifier_names() -> list[str]:
    """Return the classifiers of torchvision, the small ones first."""
    import torchvision.models as zoo

    classifiers = list(zoo.list_models(module=zoo))
    sizes = {
        n: next(iter(zoo.get_model_weights(n))).meta["num_params"] for n in classifiers
    }
    return sorted(classifiers, key=lambda n: sizes[n])


def run_classifier(name: str, limit: float) -> list[Row]:
    """Run one classifier in a process of its own; a failure is the outcome of what is missing."""
    command = [sys.executable, "-m", "benchmarks.conformance_onnx", "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        printed = done.stdout
        end = (done.stderr.strip().splitlines() or [""])[-1][:200]
    except subprocess.TimeoutExpired as error:
        printed = (
            error.stdout.decode()
            if isinstance(error.stdout, bytes)
            else error.stdout or ""
        )
        end = f"time limit of {limit:.0f} s"
    rows = [
        json.loads(line)
        for line in printed.splitlines()
        if line.startswith('{"section"')
    ]
    missing = [
        exporter
        for exporter in EXPORTERS
        if exporter not in {r["section"] for r in rows}
    ]
    failed = [
        {"section": e, "name": name, "outcome": "not run", "reason": end}
        for e in missing
    ]
    return rows + failed


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "node": node_cases,
    "light": light_networks,
    "pytorch-converted": lambda: stored_models("pytorch-converted"),
    "pytorch-operator": lambda: stored_models("pytorch-operator"),
    "simple": lambda: stored_models("simple"),
}


def summary(section: str, rows: Sequence[Row]) -> list[Row]:
    """Return the counts of a section and its largest error, then what is wrong or did not run."""
    counts = Counter(row["outcome"] for row in rows)
    errors = [row["error"] for row in rows if "error" in row]
    total = {key.replace(" ", "_"): counts[key] for key in OUTCOMES}
    worst = {"largest_error": max(errors)} if errors else {}
    return [
        {"section": section, "cases": len(rows), **total, **worst},
        *(row for row in rows if row["outcome"] in ("wrong", "not run")),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sections that are asked for, or one classifier."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS, *EXPORTERS])
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument(
        "--limit", type=float, default=900, help="seconds for each classifier"
    )
    parser.add_argument(
        "--match", default="", help="only classifiers whose name contains this"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        torch.set_num_threads(1)
        for row in exported(options.one):
            print(json.dumps(row), flush=True)
        return
    chosen = options.sections or [*SECTIONS, *EXPORTERS]
    names = (
        [n for n in classifier_names() if options.match in n]
        if {*chosen} & {*EXPORTERS}
        else []
    )
    with Reporter("conformance_onnx", options.out, PEERS) as report:
        for section in (name for name in SECTIONS if name in chosen):
            for row in summary(section, list(SECTIONS[section]())):
                report.value(**row)
        rows = [row for name in names for row in run_classifier(name, options.limit)]
        for section in (name for name in EXPORTERS if name in chosen):
            for row in summary(
                section, [row for row in rows if row["section"] == section]
            ):
                report.value(**row)


if __name__ == "__main__":
    main()
