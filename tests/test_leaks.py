"""What a test leaves behind is found: threads, processes, files and settings of torch."""

import _thread
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchq
from tests import leaks

Undo = Callable[[], object]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE", 0.1)


def a_thread() -> Undo:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="thread forgotten")
    thread.start()
    return lambda: (stop.set(), thread.join())


def a_process() -> Undo:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "input('process forgotten')"], stdin=-1
    )
    assert process.stdin is not None
    return lambda: process.communicate(b"")


def a_temporary_file() -> Undo:
    path = Path(tempfile.mkstemp(suffix="file forgotten")[1])
    return path.unlink


def a_temporary_folder() -> Undo:
    path = Path(tempfile.mkdtemp(suffix="file forgotten"))
    return path.rmdir


def a_file_beside_the_sources() -> Undo:
    path = leaks.ROOT / "file forgotten"
    path.touch()
    return path.unlink


@pytest.mark.parametrize(
    "leave",
    [
        a_thread,
        a_process,
        a_temporary_file,
        a_temporary_folder,
        a_file_beside_the_sources,
    ],
)
def test_what_is_left_is_found(
    leave: Callable[[], Undo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "ROOT", tmp_path)
    before = leaks.remains()
    undo = leave()
    left = leaks.left_behind(before)
    undo()
    assert len(left) == 1
    kind = (
        leave.__name__.split("_")[-1]
        .replace("folder", "file")
        .replace("sources", "file")
    )
    assert f"{kind} forgotten" in next(iter(left))
    assert leaks.left_behind(before) == set()


def test_a_thread_that_python_did_not_start_is_not_meant() -> None:
    """Native libraries keep threads that call Python; each becomes a dummy thread there."""
    before = leaks.remains()
    number = len(threading.enumerate())
    seen = threading.Event()
    go_on = threading.Event()

    def calls_python() -> None:
        threading.current_thread()
        seen.set()
        go_on.wait()

    _thread.start_new_thread(calls_python, ())
    seen.wait()
    assert len(threading.enumerate()) > number
    assert leaks.left_behind(before) == set()
    go_on.set()


def test_settings_that_are_left_are_found() -> None:
    leaks.settings_are_torchs_own()
    with torch.no_grad(), pytest.raises(AssertionError):
        leaks.settings_are_torchs_own()
    with torch.inference_mode(), pytest.raises(AssertionError):
        leaks.settings_are_torchs_own()
    with torchq.patch(), pytest.raises(AssertionError):
        leaks.settings_are_torchs_own()
