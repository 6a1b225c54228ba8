"""``torchq quantize``: calibrate and export a user's own model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torchq
from torchq.analysis import check_path, compare_outputs
from torchq.cli.loading import load_text
from torchq.cli.prepare import (
    Prepared,
    example_of,
    named_config,
    prepare,
    read_metric,
    read_model,
    require,
    selection,
)
from torchq.errors import ConfigError

__all__ = ["check_folder", "run_quantize"]


def run_quantize(args: argparse.Namespace) -> int:
    """Carry out the command step by step, announce each step, and return the exit code."""
    if args.dry_run:
        require(args, "model")
        model, config = read_model(args), named_config(args.recipe)
        print(torchq.plan(model, config, target=args.target, **selection(args)))
        return 0
    found = prepare(args, say=print, held_out=args.compare, check=lambda: _check(args))
    metric = read_metric(args)
    _compare(found, metric, args)
    _write(found, args)
    if args.report:
        torchq.report(found.model, found.held_out, args.report, metric)
        print(f"wrote {args.report}: open it in a browser")
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


def _compare(found: Prepared, metric: object, args: argparse.Namespace) -> None:
    """Print how far the quantized model is from the float one."""
    if not args.compare:
        return
    outputs = compare_outputs(found.model, found.held_out[: args.compare], metric)
    where = "data that it was not calibrated with" if found.is_held_out else "its calibration data"
    parts = [f"signal to noise {outputs.sqnr:.1f} dB"]
    if outputs.agreement is not None:
        parts.insert(0, f"same class for {outputs.agreement:.2%} of {outputs.predictions}")
    if outputs.score is not None:
        parts.insert(0, f"{outputs.metric} {outputs.float_score:.4g} -> {outputs.score:.4g}")
    print(f"beside the float model, on {where}: {', '.join(parts)}")


def _write(found: Prepared, args: argparse.Namespace) -> None:
    model, example = found.model, found.example
    if args.save:
        torchq.save(model, args.save)
        print(f"wrote {args.save}: load it with\n  {load_text(args.model, args.save)}")
    if args.export:
        torchq.export_onnx(model, (example[:1],), args.export, opset=args.opset, target=args.target)
        print(f"wrote {args.export} ({Path(args.export).stat().st_size / 2**20:.2f} MiB)")
        batches = [example_of(batch) for batch in found.calibration[: args.verify]]
        print(torchq.verify_onnx(model, args.export, batches))
    if not (args.save or args.export or args.report):
        print(torchq.summary(model))
        print("nothing written; use --export FILE.onnx, --save FILE.pt or --report FILE.html")
