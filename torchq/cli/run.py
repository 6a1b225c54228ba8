"""What carries out each command; main.py loads it when one runs, as it loads torch."""

import argparse
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchq.cli.commands import (
    run_convert,
    run_doctor,
    run_forecast,
    run_inspect,
    run_plan,
    run_quantize,
    run_report,
)
from torchq.cli.demo import run_demo
from torchq.cli.loading import check_paths

#: Command -> what carries it out and returns the exit code.
RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    "demo": run_demo,
    "convert": run_convert,
    "quantize": run_quantize,
    "forecast": run_forecast,
    "doctor": run_doctor,
    "report": run_report,
    "inspect": run_inspect,
    "plan": run_plan,
}


def run(args: argparse.Namespace) -> int:
    """Check the files that the arguments name, carry out the command, return the exit code."""
    check_paths(args)
    if hasattr(args, "model"):
        args.model = args.model or args.file
    with _warnings_of_a_program(f"torchq {args.command}"):
        return RUNS[args.command](args)


@contextmanager
def _warnings_of_a_program(name: str) -> Iterator[None]:
    """Print warnings as a program says them: without the file and the line that they come from."""

    def text_of(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        return f"{name}: warning: {message}\n"

    before = warnings.formatwarning
    warnings.formatwarning = text_of
    try:
        yield
    finally:
        warnings.formatwarning = before
