"""Functions that run in a new process, which has torch but neither torchq nor what a test did.

A server imports torch once for each test process; each new process is a fork of it, which takes
milliseconds instead of the seconds of a new interpreter. A test starts an interpreter of its own
only where the start itself is tested.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["Running", "call", "printed_by_script", "run_code", "run_script"]

#: Systems without a server start an interpreter for each process.
METHOD = (
    "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
)
CONTEXT = multiprocessing.get_context(METHOD)
#: Parts of torch that many functions need.
PRELOADED = ["torch", "torch.distributed.fsdp", "torch._dynamo"]
#: Seconds after which a process is given up.
PATIENCE = 240.0


class Running:
    """A function that runs in a new process.

    Args:
        function: of a module that the new process can import.
        arguments: that can be pickled.
        environment: variables that are set before the function is called, beside those of here.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if METHOD == "forkserver":
            CONTEXT.set_forkserver_preload(PRELOADED)
        self.receiver, sender = CONTEXT.Pipe(duplex=False)
        variables = {**os.environ, **(environment or {})}
        self.process = CONTEXT.Process(
            target=_answer, args=(sender, os.getcwd(), variables, function, arguments)
        )
        self.process.start()
        sender.close()

    def result(self) -> Any:
        """Return what the function returned; fail with its traceback if it raised."""
        try:
            assert self.receiver.poll(PATIENCE), f"no answer within {PATIENCE:g} s"
            answer, failure = self.receiver.recv()
        except EOFError:
            answer = None
            failure = "the process ended without an answer"
        finally:
            self.process.join(5)
            self.process.kill()
            self.process.join()
        assert not failure, failure
        return answer


def _answer(
    sender: Connection,
    folder: str,
    variables: Mapping[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    try:
        sender.send((function(*arguments), ""))
    except BaseException:
        sender.send((None, traceback.format_exc()))


def call(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Return what a function returns in a new process; see :class:`Running`."""
    return Running(function, *arguments, environment=environment).result()


def run_code(code: str, environment: Mapping[str, str] | None = None) -> str:
    """Return what a program prints that is run in a new process, as ``python -c`` would run it."""
    return str(call(_printed, code, environment=environment))


def run_script(path: Path, *arguments: str) -> str:
    """Return what a script prints that is run in a new process, as ``python path`` would run it."""
    return str(call(printed_by_script, path, *arguments))


def _printed(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def printed_by_script(path: Path, *arguments: str) -> str:
    """Run a script in this process, and return what it prints."""
    sys.argv = [str(path), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()
