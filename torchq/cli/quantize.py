"""``torchq quantize``: calibrate, compare and export a user's own model."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torchq
from torchq.analysis import check_path, compare_outputs
from torchq.cli.loading import load_text
from torchq.cli.prepare import (
    Prepared,
    example_of,
    named_config,
    prepare,
    quiet,
    read_metric,
    read_model,
    require,
    selection,
)
from torchq.errors import ConfigError, TorchqError

__all__ = ["check_folder", "run_quantize"]

#: Where the report goes if no other file is written.
_REPORT = "torchq-report.html"


def run_quantize(args: argparse.Namespace) -> int:
    """Carry out the command step by step, announce each step, and return the exit code."""
    if args.dry_run:
        require(args, "model")
        model, config = read_model(args), named_config(args.recipe)
        print(torchq.plan(model, config, target=args.target, **selection(args)))
        return 0
    say: Callable[[object], None] = quiet if args.json else print
    found = prepare(args, say=say, held_out=args.compare, check=lambda: _check(args))
    metric = read_metric(args)
    comparison = _compare(found, metric, args, say)
    files = _write(found, args, say)
    report = _report(found, metric, args, say)
    if report is not None:
        files["report"] = report
    if args.json:
        data = {"model": args.model, "recipe": args.recipe, "comparison": comparison}
        print(json.dumps({**data, "files": files}, indent=2))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise an error for what would fail later."""
    for option in ("export", "save", "report"):
        check_folder(f"--{option}", getattr(args, option))
    if args.report:
        check_path(args.report)
    read_metric(args)


def check_folder(option: str, path: str | None) -> None:
    """Raise an error where a file could not be written later, before any work is done.

    Raises:
        ConfigError: The path is a folder, or its folder is missing or not writable.
    """
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise ConfigError(f"{option} {path}: is a folder; expected a file")
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {path}: the folder {folder} is not writable")


def _compare(
    found: Prepared, metric: object, args: argparse.Namespace, say: Callable[[object], None]
) -> dict[str, Any] | None:
    """Say how far the quantized model is from the float one, and return the figures."""
    if not args.compare:
        return None
    outputs = compare_outputs(found.model, found.held_out[: args.compare], metric)
    where = "data that it was not calibrated with" if found.is_held_out else "its calibration data"
    parts = [f"signal to noise {outputs.sqnr:.1f} dB"]
    if outputs.agreement is not None:
        parts.insert(0, f"same class for {outputs.agreement:.2%} of {outputs.predictions}")
    if outputs.score is not None:
        parts.insert(0, f"{outputs.metric} {outputs.float_score:.4g} -> {outputs.score:.4g}")
    say(f"beside the float model, on {where}: {', '.join(parts)}")
    return {**vars(outputs), "held_out": found.is_held_out}


def _write(
    found: Prepared, args: argparse.Namespace, say: Callable[[object], None]
) -> dict[str, str]:
    """Write the files that were asked for, and return their paths."""
    model, example = found.model, found.example
    written = {}
    if args.save:
        torchq.save(model, args.save)
        say(f"wrote {args.save}: load it with\n  {load_text(args.model, args.save)}")
        written["save"] = args.save
    if args.export:
        torchq.export_onnx(model, (example[:1],), args.export, opset=args.opset, target=args.target)
        say(f"wrote {args.export} ({Path(args.export).stat().st_size / 2**20:.2f} MiB)")
        batches = [example_of(batch) for batch in found.calibration[: args.verify]]
        say(torchq.verify_onnx(model, args.export, batches))
        written["export"] = args.export
    if not written:
        say(torchq.summary(model))
        say("the model was not written; use --export FILE.onnx or --save FILE.pt")
    return written


def _report(
    found: Prepared, metric: object, args: argparse.Namespace, say: Callable[[object], None]
) -> str | None:
    """Write the report, and return its path; None where there is none.

    A report that nobody asked for must not turn success into failure.
    """
    if args.no_report:
        return None
    beside = args.export or args.save
    default = str(Path(beside).with_suffix(".report.html")) if beside else _REPORT
    path: str = args.report or default
    try:
        torchq.report(found.model, found.held_out, path, metric, plan=args.report is not None)
    except TorchqError as error:
        if args.report:
            raise
        say(f"no report: {error}")
        return None
    say(f"wrote {path}: open it in a browser to see which layers cost accuracy")
    return path
