"""``torchq doctor``, ``report``, ``inspect`` and ``plan``."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torchq
from torchq.analysis import check_path
from torchq.analysis.metrics import plain
from torchq.analysis.mixed_precision import check_budget, check_formats
from torchq.cli.prepare import (
    named_config,
    prepare,
    quiet,
    read_batches,
    read_metric,
    read_model,
    require,
    selection,
)
from torchq.errors import ConfigError
from torchq.utils import replacing


def _show(args: argparse.Namespace, text: object, data: Callable[[], Any]) -> None:
    print(json.dumps(data(), indent=2) if args.json else text)


def run_doctor(args: argparse.Namespace) -> int:
    """Look for mistakes; 1 if there is an error."""
    found = prepare(args, say=quiet, held_out=0, check=lambda: read_metric(args))
    report = torchq.doctor(found.model, found.calibration, metric=read_metric(args))
    _show(args, report, lambda: plain({"ok": report.ok, **dataclasses.asdict(report)}))
    return 0 if report.ok else 1


def run_report(args: argparse.Namespace) -> int:
    """Write or print the report."""
    found = prepare(args, say=quiet, held_out=args.num_batches, check=lambda: _check_out(args))
    report = torchq.report(found.model, found.held_out, args.out, read_metric(args))
    verdict = report.data["verdict"]
    written = f"{verdict['sentence']} {verdict['blame']}\nwrote {args.out}"
    _show(args, report if args.out is None else written, lambda: report.data)
    return 0


def _check_out(args: argparse.Namespace) -> None:
    """Raise an error for what would fail later."""
    read_metric(args)
    if args.out is not None:
        check_path(args.out)


def run_inspect(args: argparse.Namespace) -> int:
    """Say what is quantized."""
    require(args, "model")
    if args.model.endswith(".onnx"):
        report = torchq.inspect_onnx(args.model)
        _show(args, report, lambda: dataclasses.asdict(report))
        return 0
    if args.model.endswith((".pt", ".pth")):
        text = f"inspect {args.model}: holds ranges and weights without a model; pass --model "
        text += f"package.module:name --data ... --load {args.model}"
        raise ConfigError(text)
    if args.load is not None or args.data is not None:
        summary = torchq.summary(prepare(args, say=quiet, held_out=0).model)
    else:
        model = read_model(args)
        torchq.quantize_(model, named_config(args.recipe), target=args.target, **selection(args))
        summary = torchq.summary(model)
    rows = [vars(row) for row in (summary.layers or summary.rows)]
    _show(args, summary, lambda: {"rows": rows, "float": list(summary.float_modules)})
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """Say what would be quantized, or choose formats."""
    require(args, "model")
    _check_plan(args)
    model = read_model(args)
    if not args.budget:
        found = torchq.plan(model, named_config(args.recipe), target=args.target, **selection(args))
        fields = ("name", "input", "weight", "reason")
        rows = [
            {k: None if (v := getattr(d, k)) is None else str(v) for k in fields}
            for d in found.decisions
        ]
        shown = found.table() if args.rows else found
        _show(args, shown, lambda: {"decisions": rows, "config": found.recipe})
        return 0
    batches, _ = read_batches(model, args)
    if args.fuse:
        torchq.fuse_(model, batches[0])
    config = torchq.mixed_precision(
        model, batches, budget=_budget(args.budget), formats=_formats(args), exclude=args.exclude
    )
    if args.out is not None:
        with replacing(args.out) as (path,):
            path.write_text(config.to_json(), encoding="utf-8")
    _show(args, config, config.summary)
    return 0


def _check_plan(args: argparse.Namespace) -> None:
    """Raise an error for options of a plan under a budget that do not fit."""
    if args.out is not None and not (args.budget and args.out.endswith(".json")):
        raise ConfigError(f"--out {args.out}: expected --budget, and a name that ends in .json")
    if args.budget:
        require(args, "model", "data")
        check_budget(_budget(args.budget))
        check_formats(_formats(args))


def _formats(args: argparse.Namespace) -> list[int | str]:
    return [int(name) if name.isdigit() else name for name in args.formats]


def _budget(texts: list[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        kind, _, number = text.partition("=")
        try:
            found[kind] = float(number)
        except ValueError:
            problem = f"--budget {text}: expected KIND=NUMBER, such as mean_bits=5"
            raise ConfigError(problem) from None
    return found
