"""``torchq quantize``: calibrate, compare and export a user's own model."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torchq
from torchq.analysis import check_path, compare_outputs
from torchq.cli.files import check_different, check_folder, writers_of
from torchq.cli.loading import load_text
from torchq.cli.prepare import (
    Prepared,
    example_of,
    named_config,
    named_ranges,
    prepare,
    quiet,
    read_metric,
    read_model,
    require,
    selection,
)
from torchq.errors import TorchqError
from torchq.runtime import Writer, reference_runtime, runtime_of
from torchq.runtimes import Engine
from torchq.utils.optional import import_optional

#: Where the report goes if no other file is written.
_REPORT = "torchq-report.html"


def run_quantize(args: argparse.Namespace) -> int:
    """Carry out the command step by step, announce each step, and return the exit code."""
    if args.dry_run:
        require(args, "model")
        model, config = read_model(args), named_config(args.recipe)
        print(torchq.plan(model, config, target=args.target, **selection(args)).table())
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
    report = _report_path(args)
    if report is not None:
        check_folder("--report", report)
        check_different({"--export": args.export, "--save": args.save, "--report": report})
    if args.report:
        check_path(args.report)
    if args.export and _own_writer(args) is None:
        for package in reference_runtime().packages:
            import_optional(package, "--export")
    elif args.export and isinstance(runtime := runtime_of(args.target), Engine):
        runtime.check()
    read_metric(args)


def _own_writer(args: argparse.Namespace) -> Writer | None:
    """Return what writes the file of --export where it is one of the target's own, no ONNX."""
    return writers_of(args).get(Path(args.export).suffix)


def _report_path(args: argparse.Namespace) -> str | None:
    """Return where the report goes, or None."""
    beside = args.export or args.save
    if named_ranges(args):
        return args.report
    default = str(Path(beside).with_suffix(".report.html")) if beside else _REPORT
    return None if args.no_report else args.report or default


def _compare(
    found: Prepared, metric: object, args: argparse.Namespace, say: Callable[[object], None]
) -> dict[str, Any] | None:
    """Say how far the quantized model is from the float one, and return the figures."""
    if not args.compare or named_ranges(args):
        return None
    outputs = compare_outputs(found.model, found.held_out, metric)
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
    model = found.model
    written = {}
    if args.save:
        torchq.save(model, args.save)
        say(f"wrote {args.save}: load it with\n  {load_text(args.model, args.save, args.weights)}")
        written["save"] = args.save
    if args.export and (write := _own_writer(args)):
        say(write(model, (found.example,), Path(args.export)))
        written["export"] = args.export
    elif args.export:
        options = {"opset": args.opset, "target": args.target}
        options["dynamic_batch"] = not found.fixed_batch
        report = torchq.export_onnx(model, (found.example,), args.export, **options)
        say(f"wrote {args.export} ({Path(args.export).stat().st_size / 2**20:.2f} MiB)")
        for note in report.notes:
            say(note)
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
    """Write the report, and return its path; one that nobody asked for may fail."""
    path = _report_path(args)
    if path is None:
        return None
    try:
        torchq.report(found.model, found.held_out, path, metric, plan=args.report is not None)
    except TorchqError as error:
        if args.report:
            raise
        say(f"no report: {error}")
        return None
    say(f"wrote {path}: open it in a browser to see which layers cost accuracy")
    return path
