"""Count which ONNX files `torchq.from_onnx` reads, and whether they compute what they should.

The cases are those that the package onnx ships: 1,884 of single nodes (in onnx 1.23), the models
and operators that PyTorch exported years ago, and the light networks, which are compared with ONNX
Runtime. Then every classifier of torchvision is exported with both exporters of torch, read again,
and compared with itself; the figure is the largest error divided by the largest output. Weights
are random and inputs small. Each classifier runs in a process of its own with a time limit.

Results are appended to a file as they come, and a second run goes on where the first one ended;
``--again`` repeats sections. At the end the file keeps the last result of each case.

Example:
    python -m benchmarks.conformance_onnx --out benchmarks/results/conformance_onnx.jsonl
    python -m benchmarks.conformance_onnx --out benchmarks/results/conformance_onnx.jsonl --table
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

__all__ = ["SECTIONS", "main", "table"]

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
HALF_PRECISION = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}  # two units in the last place


def as_tensor(value: Any) -> Tensor:
    """Return an array or message of a case as a tensor."""
    if hasattr(value, "data_type"):
        return tensor_of(value, None, "case")
    array = np.array(value)
    name = {"bfloat16": "bfloat16"} | {f"float8_{k}": f"float8_{k}" for k in ("e4m3fn", "e5m2")}
    name |= {f"float8_{k}": f"float8_{k}" for k in ("e4m3fnuz", "e5m2fnuz")}
    if array.dtype.name in name:
        bits = array.view(f"int{8 * array.dtype.itemsize}")
        return torch.from_numpy(bits).view(getattr(torch, name[array.dtype.name]))
    return torch.from_numpy(array)


def difference(got: Tensor, expected: Any, rtol: float, atol: float) -> str:
    """Return how an output differs from the expected one, "" where it does not."""
    wanted = as_tensor(expected)
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{got.dtype} {tuple(got.shape)} for {wanted.dtype} {tuple(wanted.shape)}"
    rtol = max(rtol, HALF_PRECISION.get(got.dtype, 0.0))
    if torch.allclose(got.double(), wanted.double(), rtol, atol, equal_nan=True):
        return ""
    return f"largest error {(got.double() - wanted.double()).abs().max():.3g}"


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
                results = model(*[as_tensor(value) for value in inputs[: len(model.input_names)]])
            results = results if isinstance(results, tuple) else (results,)
            for got, expected in zip(results, outputs, strict=True):
                text = difference(got, expected, rtol, atol)
                if text:
                    return {"outcome": "wrong", "reason": text}
    except Exception as error:  # the same
        return {"outcome": "wrong", "reason": f"{type(error).__name__}: {error}"[:200]}
    return {"outcome": "right"}


def node_cases() -> Iterator[Row]:
    """Yield the outcome of each case of a single node."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases are made by code that overflows on purpose
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    for case in cases:
        atol = NOISY.get(case.name, case.atol)
        found = outcome(case.model, case.data_sets, case.rtol, atol)
        yield {"section": "node", "name": case.name} | found


def stored_models(kind: str) -> Iterator[Row]:
    """Yield the outcome of each model in a folder of the package onnx."""
    import onnx

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / kind
    for path in sorted(folder.iterdir()):
        sets = sorted(path.glob("test_data_set_*"))
        data = (tuple(_stored(entry, part) for part in ("input", "output")) for entry in sets)
        yield {"section": kind, "name": path.name} | outcome(path / "model.onnx", data, 1e-3, 1e-5)


def _stored(folder: Path, part: str) -> list[Tensor]:
    import onnx

    paths = sorted(folder.glob(f"{part}_*.pb"), key=lambda path: int(path.stem.split("_")[-1]))
    return [as_tensor(onnx.TensorProto.FromString(path.read_bytes())) for path in paths]


def light_networks() -> Iterator[Row]:
    """Yield the outcome of each light network against ONNX Runtime, its weights all one number."""
    import onnx
    import onnxruntime

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in sorted(folder.glob("*.onnx")):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        model = torchq.from_onnx(path)
        (name,) = model.input_names
        shape = next(info.shape for info in session.get_inputs() if info.name == name)
        x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            got, wanted = model(x), torch.from_numpy(session.run(None, {name: x.numpy()})[0])
        error = float((got - wanted).abs().max() / wanted.abs().max())
        verdict = "right" if error <= LIMIT else "wrong"
        yield {"section": "light", "name": path.stem, "outcome": verdict, "error": error}


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
            nn.init.normal_(module.weight, std=0.02)  # the heads of vision transformers are zero
    return model, torch.randn(1, 3, size, size)


def exported(name: str) -> Iterator[Row]:
    """Yield how well a classifier comes back from the files of both exporters."""
    model, x = network(name)
    with torch.no_grad():
        wanted = model(x)
    for exporter, dynamo in EXPORTERS.items():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older exporter warns of its age
            path = Path(folder) / "model.onnx"
            quiet = {"verbose": False} if dynamo else {}
            torch.onnx.export(model, (x,), str(path), dynamo=dynamo, **quiet)
            found = torchq.from_onnx(path)
            with torch.no_grad():
                error = float((found(x) - wanted).abs().max() / wanted.abs().max())
        verdict = "right" if error <= LIMIT else "wrong"
        yield {"section": exporter, "name": name, "outcome": verdict, "error": error}


def classifier_names() -> list[str]:
    """Return the classifiers of torchvision, the small ones first."""
    import torchvision.models as zoo

    found = list(zoo.list_models(module=zoo))
    sizes = {n: next(iter(zoo.get_model_weights(n))).meta["num_params"] for n in found}
    return sorted(found, key=lambda n: sizes[n])


def run_classifier(name: str, limit: float) -> list[Row]:
    """Run one classifier in a process of its own; a failure is the outcome of what is missing."""
    command = [sys.executable, "-m", "benchmarks.conformance_onnx", "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        text, end = done.stdout, (done.stderr.strip().splitlines() or [""])[-1][:200]
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        end = f"time limit of {limit:.0f} s"
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"section"')]
    missing = [exporter for exporter in EXPORTERS if exporter not in {r["section"] for r in rows}]
    failed = [{"section": e, "name": name, "outcome": "not run", "reason": end} for e in missing]
    return rows + failed


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "node": node_cases,
    "light": light_networks,
    "pytorch-converted": lambda: stored_models("pytorch-converted"),
    "pytorch-operator": lambda: stored_models("pytorch-operator"),
    "simple": lambda: stored_models("simple"),
}


def read(path: Path) -> list[Row]:
    """Return the results in a file, the last one of each case."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {(r["section"], r["name"]): r for r in lines if r["kind"] == "result"}
    return list(found.values())


def keep_last(path: Path) -> None:
    """Drop results that later ones replace, and descriptions of machines that have none left."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    found = [json.loads(line) for line in lines]
    last = {(r["section"], r["name"]): i for i, r in enumerate(found) if r["kind"] == "result"}
    kept, waiting = [], ""
    for number, row in enumerate(found):
        if row["kind"] != "result":
            waiting = lines[number]
        elif last[row["section"], row["name"]] == number:
            kept += [waiting, lines[number]]
            waiting = ""
    new = path.with_suffix(".new")
    new.write_text("".join(kept), encoding="utf-8")
    new.replace(path)


def table(rows: Sequence[Row]) -> str:
    """Return the counts of each section as Markdown, then what is wrong, and what is refused."""
    lines = [
        "| cases | right | refused | wrong | not run | largest error |",
        "|---|---|---|---|---|---|",
    ]
    for section in [*SECTIONS, *EXPORTERS]:
        own = [row for row in rows if row["section"] == section]
        counts = Counter(row["outcome"] for row in own)
        errors = [row["error"] for row in own if "error" in row]
        cells = [str(counts[key]) for key in ("right", "refused", "wrong", "not run")]
        worst = f"{max(errors):.1e}" if errors else ""
        lines.append(f"| {section} ({len(own)}) | " + " | ".join(cells) + f" | {worst} |")
    for row in rows:
        if row["outcome"] in ("wrong", "not run"):
            lines.append(
                f"{row['outcome']}: {row['section']} {row['name']}: {row.get('reason', '')}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases, or one classifier, or print the table of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/conformance_onnx.jsonl")
    )
    parser.add_argument("--limit", type=float, default=900, help="seconds for each classifier")
    parser.add_argument("--match", default="", help="only classifiers whose name contains this")
    parser.add_argument("--no-classifiers", action="store_true", help="only the cases of onnx")
    parser.add_argument("--again", nargs="+", default=[], choices=[*SECTIONS, *EXPORTERS])
    parser.add_argument("--table", action="store_true", help="print the results, run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        torch.set_num_threads(1)
        for row in exported(options.one):
            print(json.dumps(row), flush=True)
        return
    if not options.table:
        rows = [row for row in read(options.out) if row["section"] not in options.again]
        known = {(row["section"], row["name"]) for row in rows}
        with Reporter("conformance_onnx", options.out, PEERS) as report:
            for section, cases in SECTIONS.items():
                if not any(section == done for done, _ in known):
                    for row in cases():
                        report.value(**row)
            chosen = [] if options.no_classifiers else classifier_names()
            for name in chosen:
                done = all((exporter, name) in known for exporter in EXPORTERS)
                if options.match in name and not done:
                    for row in run_classifier(name, options.limit):
                        report.value(**row)
        keep_last(options.out)
    print(table(read(options.out)))


if __name__ == "__main__":
    main()
