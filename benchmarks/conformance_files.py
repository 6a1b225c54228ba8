"""Compare ONNX files that others made with ONNX Runtime: what is read, and how exact it is.

Each file gets one batch of random numbers. The error is the largest difference divided by the
largest output; up to 1e-4 is right, and so is a difference of 2e-7, the error of ONNX Runtime's own
Sigmoid, where a detector that sees nothing gives outputs of that size. Of other files both results
are also compared with those of the read model in float64. Results are appended to a file, and a
second run goes on where the first one ended; ``--table`` prints them.

Args of the command line: folders and files, and ``--size NAME=N`` for open sizes, where NAME is an
axis or the name of an input and an axis, as in ``--size 2=48 --size state.1=1``; ``--value NAME=N``
fills an input of integers.

Example:
    python -m benchmarks.conformance_files models/ --size 2=320 --size 3=320 --out files.jsonl
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchq
from benchmarks.harness import Reporter
from torchq.errors import FrontendError

__all__ = ["main"]

Row = dict[str, Any]
LIMIT, SIGMOID = 1e-4, 2e-7
TYPES = {"float": np.float32, "float16": np.float16, "double": np.float64, "int64": np.int64}
TYPES |= {"int32": np.int32, "bool": np.bool_}


def batch(session: Any, sizes: Mapping[str, int], values: Mapping[str, int]) -> dict[str, Any]:
    """Return random inputs of a session; open sizes are 1, then 3 channels, then 64."""
    rng, found = np.random.default_rng(0), {}
    for info in session.get_inputs():
        fallback = {0: 1, 1: 3 if len(info.shape) == 4 else 64}
        shape = [
            size
            if isinstance(size, int) and size > 0
            else sizes.get(f"{info.name}.{axis}", sizes.get(str(axis), fallback.get(axis, 64)))
            for axis, size in enumerate(info.shape)
        ]
        dtype = TYPES[info.type.removeprefix("tensor(").removesuffix(")")]
        if np.issubdtype(dtype, np.floating):
            found[info.name] = (rng.standard_normal(shape) * 0.5).astype(dtype)
        elif info.name in values or dtype is np.bool_:
            found[info.name] = np.full(shape, values.get(info.name, 1), dtype)
        else:
            found[info.name] = rng.integers(0, 256, shape).astype(dtype)
    return found


def outputs(model: torch.nn.Module, feeds: Mapping[str, Any], double: bool = False) -> list[Any]:
    """Return what a model gives as arrays."""
    tensors = [torch.from_numpy(value) for value in feeds.values()]
    if double:
        tensors = [x.double() if x.is_floating_point() else x for x in tensors]
    with torch.no_grad():
        got = model(*tensors)
    return [x.numpy() for x in ((got,) if isinstance(got, Tensor) else got)]


def difference(one: Sequence[Any], other: Sequence[Any]) -> tuple[float, float]:
    """Return the largest difference of outputs: as a share of the largest output, and as it is."""
    found = [(0.0, 0.0)]
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape:
            return float("inf"), float("inf")
        if a.size:
            error = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
            found.append((error / max(float(np.abs(b.astype(np.float64)).max()), 1e-30), error))
    return max(share for share, _ in found), max(error for _, error in found)


def compare(path: Path, sizes: Mapping[str, int], values: Mapping[str, int]) -> Row:
    """Return what became of one file."""
    import onnx
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    stored = onnx.load(path, load_external_data=False)
    opset = max(o.version for o in stored.opset_import if o.domain in ("", "ai.onnx"))
    producer = f"{stored.producer_name} {stored.producer_version}".strip()
    row = {"opset": opset, "producer": producer, "nodes": len(stored.graph.node)}
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        feeds = batch(session, sizes, values)
        wanted = session.run(None, feeds)
    except Exception as error:  # the binding raises several kinds
        return row | {"outcome": "no reference", "reason": str(error).strip()[:160]}
    try:
        model = torchq.from_onnx(path)
    except FrontendError as error:
        return row | {"outcome": "refused", "reason": str(error).replace(f"{path}", "")[:160]}
    got = outputs(model, feeds)
    row["error"], row["difference"] = difference(got, wanted)
    if row["error"] <= LIMIT or row["difference"] <= SIGMOID:
        return row | {"outcome": "right"}
    exact = outputs(model.double(), feeds, double=True)
    row |= {"error_to_float64": difference(got, exact)[0]}
    row |= {"error_of_reference_to_float64": difference(wanted, exact)[0]}
    return row | {"outcome": "differs"}


def table(path: Path) -> str:
    """Return the rows of a file as Markdown."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    titles = ("file", "opset", "nodes", "outcome", "error", "difference", "reason")
    found = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in (line for line in lines if line["kind"] == "result"):
        cells = [row.get(title, "") for title in titles]
        shown = [f"{cell:.1e}" if isinstance(cell, float) else str(cell) for cell in cells]
        found.append("| " + " | ".join(shown) + " |")
    return "\n".join(found)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the files, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files, and folders of files")
    parser.add_argument("--size", action="append", default=[], help="NAME=N for open sizes")
    parser.add_argument("--value", action="append", default=[], help="NAME=N for integer inputs")
    parser.add_argument("--root", type=Path, default=Path(), help="names of files begin below it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print the results, run nothing")
    options = parser.parse_args(argv)
    if options.table:
        print(table(options.out))
        return
    torch.set_num_threads(1)
    given = [{k: int(v) for k, _, v in (item.partition("=") for item in options.size)}]
    given += [{k: int(v) for k, _, v in (item.partition("=") for item in options.value)}]
    lines = options.out.read_text(encoding="utf-8").splitlines() if options.out.exists() else []
    done = {json.loads(line).get("file") for line in lines}
    files = [f for p in options.paths for f in (sorted(p.rglob("*.onnx")) if p.is_dir() else [p])]
    with Reporter("conformance_files", options.out, ("onnx", "onnxruntime")) as report:
        for path in files:
            name = str(path.relative_to(options.root) if options.root != Path() else path)
            if name not in done:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of what files of others hold
                    report.value(file=name, **compare(path, *given))


if __name__ == "__main__":
    main()
