"""``torchq convert``, ``quantize``, ``doctor``, ``report``, ``inspect`` and ``plan``."""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from torchq.analysis import check_path, compare_outputs
from torchq.analysis.mixed_precision import check_budget, check_formats
from torchq.analysis.outputs import Score, find_metric, plain
from torchq.cli.loading import (
    ENDINGS,
    check_different,
    check_folder,
    explained,
    is_network_file,
    load_model,
    load_text,
    writers_of,
)
from torchq.cli.prepare import (
    Prepared,
    example_of,
    fixed_batch,
    named_config,
    named_ranges,
    prepare,
    quiet,
    read_batches,
    read_metric,
    read_model,
    require,
    selection,
)
from torchq.errors import ConfigError, ExportError, TorchqError
from torchq.graph import move_to
from torchq.runtime import Writer, reference_runtime, runtime_of
from torchq.runtimes import Engine
from torchq.runtimes.beside_float import speed_line
from torchq.utils import replacing
from torchq.utils.optional import import_optional

#: Batches that a file is compared on.
_VERIFIED = 2
#: Where the report goes if no other file is written.
_REPORT = "torchq-report.html"


def run_convert(options: argparse.Namespace) -> int:
    """Read the file, export the model, and write it."""
    if not is_network_file(options.file):
        raise ConfigError(
            f"got {options.file!r}; expected a name that ends in {', '.join(ENDINGS)}"
        )
    target = Path(options.to)
    shapes = [_sizes(shape_text) for shape_text in options.shape]
    model: Any = load_model(options.file, options.weights)
    example = _random_inputs(model, shapes)
    program = _export(model, example)
    with replacing(target) as (temporary,):
        torch.export.save(program, temporary)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"read {options.file}: {len(model.graph.nodes)} nodes, {parameters} parameters"
    )
    # torch does not know the operators of torchq before the package that defines them is imported.
    first = "import torchq.frontends; " if _has_own_operators(program) else ""
    print(
        f"wrote {target}; load it with {first}torch.export.load({str(target)!r}).module()"
    )
    return 0


def _has_own_operators(program: torch.export.ExportedProgram) -> bool:
    """Return True if a program calls operators that torchq defines."""
    namespaces = [getattr(node.target, "namespace", "") for node in program.graph.nodes]
    return "torchq" in namespaces


def _sizes(text: str) -> list[int]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII) or "0" in text.split(
        ","
    ):
        raise ConfigError(f"--shape {text}: expected sizes as 1,3,224,224")
    return [int(size) for size in text.split(",")]


def _random_inputs(model: nn.Module, shapes: list[list[int]]) -> tuple[Tensor, ...]:
    """Return random inputs, of ``shapes`` or of those that the file states, open sizes 1."""
    names: Any = model.input_names
    input_shapes: Any = model.input_shapes
    if shapes and len(shapes) != len(names):
        raise ConfigError(
            f"--shape: got {len(shapes)}; expected one for each of {', '.join(names)}"
        )
    result = []
    for number, name in enumerate(names):
        sizes = [size or 1 for size in input_shapes[number] or ()]
        if shapes:
            sizes = shapes[number]
        if not sizes:
            raise ConfigError(
                f"the file does not state the shape of {name!r}; pass --shape"
            )
        with explained(f"--shape {','.join(map(str, sizes))}"):
            result.append(torch.randn(sizes))
    return tuple(result)


def _export(
    model: nn.Module, example: tuple[Tensor, ...]
) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(model, example)
    except Exception as error:  # torch.export raises many kinds of errors
        line = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"convert: torch.export cannot follow the network ({type(error).__name__}: {line}). "
            "Layers that choose detections are such; cut them off, or use the model in Python"
        ) from error


def run_quantize(args: argparse.Namespace) -> int:
    """Carry out the command step by step, announce each step, and return the exit code."""
    say: Callable[[object], None] = quiet if args.json else print
    prepared = prepare(args, say=say, held_out=args.compare, check=lambda: _check(args))
    metric = read_metric(args)
    comparison = _compare(prepared, metric, args, say)
    files = _write(prepared, metric, args, say)
    timing = speed_line(prepared.model, prepared.example)
    if timing:
        say(timing)
    report = _report(prepared, metric, args, say)
    if report is not None:
        files["report"] = report
    if args.json:
        data = {"model": args.model, "recipe": args.recipe, "comparison": comparison}
        print(json.dumps({**data, "files": files, "speed": timing}, indent=2))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise an error for what would fail later."""
    report = _report_path(args)
    if report is not None:
        check_folder("--report", report)
        check_different(
            {"--export": args.export, "--save": args.save, "--report": report}
        )
    if args.report:
        check_path(args.report)
    if args.export:
        _check_export(args)
    read_metric(args)


def _check_export(args: argparse.Namespace) -> None:
    """Raise an error where the file cannot be written, or the one that runs it is not here."""
    _check_has_files(args)
    has_own_writer = _own_writer(args) is not None
    if not has_own_writer:
        for package in reference_runtime().packages:
            import_optional(package, "--export")
    runtime = runtime_of(args.target)
    if isinstance(runtime, Engine) and (has_own_writer or _is_emulated(args)):
        runtime.check()


def _check_has_files(args: argparse.Namespace) -> None:
    """Raise an error for a target that reads no such file."""
    runtime = runtime_of(args.target)
    if runtime is None or runtime.file is not None or _own_writer(args) is not None:
        return
    endings = ", ".join(runtime.writers())
    expected = (
        f"a name that ends in {endings}" if endings else "a target that reads ONNX"
    )
    advice = (
        ""
        if endings
        else ". Leave out --export, and --save the numbers that it would compute"
    )
    raise ConfigError(
        f"--export {args.export}: there are no ONNX files for {runtime.name}; expected {expected}"
        f"{advice}"
    )


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
    found: Prepared,
    metric: object,
    args: argparse.Namespace,
    say: Callable[[object], None],
) -> dict[str, object] | None:
    """Say how far the quantized model is from the float one, and return the figures."""
    if not args.compare or named_ranges(args):
        return None
    outputs = compare_outputs(found.model, found.held_out, metric)
    where = (
        "data that it was not calibrated with"
        if found.is_held_out
        else "its calibration data"
    )
    parts = [f"signal to noise {outputs.sqnr:.1f} dB"]
    if outputs.agreement is not None:
        parts.insert(
            0, f"same class for {outputs.agreement:.2%} of {outputs.predictions}"
        )
    if outputs.score is not None:
        parts.insert(
            0, f"{outputs.metric} {outputs.float_score:.4g} -> {outputs.score:.4g}"
        )
    say(f"beside the float model, on {where}: {', '.join(parts)}")
    return {**vars(outputs), "held_out": found.is_held_out}


def _write(
    found: Prepared,
    metric: object,
    args: argparse.Namespace,
    say: Callable[[object], None],
) -> dict[str, str]:
    """Write the files that were asked for, and return their paths."""
    model = found.model
    written = {}
    if args.save:
        torchq.save(model, args.save)
        say(
            f"wrote {args.save}: load it with\n  {load_text(args.model, args.save, args.weights)}"
        )
        written["save"] = args.save
    if args.export and (write := _own_writer(args)):
        say(write(model, found.example, Path(args.export)))
        written["export"] = args.export
    elif args.export:
        options = {"opset": args.opset, "target": args.target}
        options["dynamic_batch"] = not found.fixed_batch
        report = torchq.export_onnx(model, found.example, args.export, **options)
        say(f"wrote {args.export} ({Path(args.export).stat().st_size / 2**20:.2f} MiB)")
        for note in report.notes:
            say(note)
        say(_verify(found, metric, args))
        written["export"] = args.export
    if not written:
        say(torchq.summary(model))
        say("the model was not written; use --export FILE.onnx or --save FILE.pt")
    return written


def _verify(
    found: Prepared, metric: Any, args: argparse.Namespace
) -> torchq.onnx.VerifyReport:
    """Compare the file with its model; where --verify is given, on the target's emulator too."""
    count = args.verify or _VERIFIED
    if not _is_emulated(args):
        batches = [
            example_of(found.model, batch) for batch in found.calibration[:count]
        ]
        return torchq.verify_onnx(found.model, args.export, batches)
    # A metric of models cannot run a file.
    of_outputs = metric and isinstance(find_metric("--metric", metric), Score)
    return torchq.verify_onnx(
        found.model,
        args.export,
        found.held_out[:count],
        target=args.target,
        metric=metric if of_outputs else None,
    )


def _is_emulated(args: argparse.Namespace) -> bool:
    """Return True if the file is to run on the emulator of its target."""
    runtime = runtime_of(args.target)
    return args.verify is not None and runtime is not None and bool(runtime.emulates)


def _report(
    found: Prepared,
    metric: object,
    args: argparse.Namespace,
    say: Callable[[object], None],
) -> str | None:
    """Write the report, and return its path; one that nobody asked for may fail."""
    path = _report_path(args)
    if path is None:
        return None
    try:
        torchq.report(
            found.model, found.held_out, path, metric, plan=args.report is not None
        )
    except TorchqError as error:
        if args.report:
            raise
        say(f"no report: {error}")
        return None
    say(f"wrote {path}: open it in a browser to see which layers cost accuracy")
    return path


def _show(args: argparse.Namespace, text: object, data: Callable[[], object]) -> None:
    print(json.dumps(data(), indent=2) if args.json else text)


def run_doctor(args: argparse.Namespace) -> int:
    """Look for mistakes; 1 if there is an error."""
    prepared = prepare(args, say=quiet, held_out=0, check=lambda: read_metric(args))
    report = torchq.doctor(
        prepared.model, prepared.calibration, metric=read_metric(args)
    )
    _show(args, report, lambda: plain({"ok": report.ok, **dataclasses.asdict(report)}))
    return 0 if report.ok else 1


def run_report(args: argparse.Namespace) -> int:
    """Write or print the report."""
    prepared = prepare(
        args, say=quiet, held_out=args.num_batches, check=lambda: _check_out(args)
    )
    report = torchq.report(
        prepared.model, prepared.held_out, args.out, read_metric(args)
    )
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
    """Say what is quantized in a file."""
    if not args.file.endswith(".onnx"):
        raise ConfigError(f"inspect {args.file}: expected a name that ends in .onnx")
    report = torchq.inspect_onnx(args.file, target=args.target)
    _show(args, report, lambda: dataclasses.asdict(report))
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """Say what would be quantized, or choose formats."""
    require(args, "model")
    _check_plan(args)
    model = read_model(args)
    if not args.budget:
        plan = torchq.plan(
            model,
            named_config(args.recipe),
            target=args.target,
            example=_example_for_plan(model, args),
            **selection(args),
        )
        fields = ("name", "input", "weight", "reason")
        rows = [
            {k: None if (v := getattr(d, k)) is None else str(v) for k in fields}
            for d in plan.decisions
        ]
        shown = plan.table() if args.rows else str(plan)
        if args.data is None and any("example=" in d.reason for d in plan.decisions):
            shown += "\nWith --data a run shows what the code does not, as for torchq quantize"
        _show(args, shown, lambda: {"decisions": rows, "config": plan.recipe})
        return 0
    batches, _ = read_batches(model, args)
    if args.fuse:
        torchq.fuse_(model, batches[0])
    config = torchq.mixed_precision(
        model,
        batches,
        budget=_budget(args.budget),
        formats=_formats(args),
        exclude=args.exclude,
    )
    if args.out is not None:
        with replacing(args.out) as (path,):
            path.write_text(config.to_json(), encoding="utf-8")
    _show(args, config, config.summary)
    return 0


def _example_for_plan(model: nn.Module, args: argparse.Namespace) -> Any:
    """Return an example where there are data, and fold the model, as ``torchq quantize`` does."""
    if args.data is None:
        return None
    batches, _ = read_batches(model, args)
    example = example_of(model, batches[0], fixed_batch(model, args) or 1)
    example = move_to(example, torch.device(args.device))
    if args.fuse:
        torchq.fuse_(model, example)
    return None if args.target is None else example


def run_forecast(args: argparse.Namespace) -> int:
    """Time the files of a model on the runtimes that are here."""
    require(args, "model")
    model = read_model(args)
    shapes = [] if args.shape is None else [_sizes(args.shape)]
    if is_network_file(args.model):
        example = _random_inputs(model, shapes)
    else:
        example = (torch.randn(shapes[0] if shapes else [1, 3, 224, 224]),)
    with (
        explained(f"--shape {args.shape}" if args.shape else "--model"),
        torch.no_grad(),
    ):
        model.eval()(*(tensor.to(args.device) for tensor in example))
    found = torchq.forecast(
        model, example, args.targets, threads=args.threads, folder=args.out
    )
    print(found)
    return 0


def _check_plan(args: argparse.Namespace) -> None:
    """Raise an error for options of a plan under a budget that do not fit."""
    if args.out is not None and not (args.budget and args.out.endswith(".json")):
        raise ConfigError(
            f"--out {args.out}: expected --budget, and a name that ends in .json"
        )
    if args.budget:
        require(args, "model", "data")
        check_budget(_budget(args.budget))
        check_formats(_formats(args))


def _formats(args: argparse.Namespace) -> list[int | str]:
    return [int(name) if name.isdigit() else name for name in args.formats]


def _budget(texts: list[str]) -> dict[str, float]:
    budget = {}
    for entry in texts:
        kind, _, number = entry.partition("=")
        try:
            budget[kind] = float(number)
        except ValueError:
            raise ConfigError(
                f"--budget {entry}: expected KIND=NUMBER, such as mean_bits=5"
            ) from None
    return budget
