"""Mutated files meet named errors only: a short run of benchmarks/fuzz.py."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks import fuzz, fuzz_mutations
from torchq.errors import ConfigError

COUNT = 50  # for each reader; the full run has 20,000 in all
FEW = 10  # of these in the default run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxscript")
    folder = tmp_path_factory.mktemp("corpus")
    fuzz.write_corpus(folder)
    return folder


@pytest.mark.parametrize("reader", fuzz.READERS)
def test_only_named_errors_come_out(reader: str, corpus: Path) -> None:
    results = [fuzz.attempt(reader, number, corpus) for number in range(FEW)]
    assert [message for message in results if message.startswith("FAIL")] == []
    assert results.count("read") < FEW


# A process takes five seconds to start; benchmarks/fuzz.py runs all readers so.
@pytest.mark.slow
@pytest.mark.parametrize("reader", ["load", "from_onnx_old"])
def test_only_named_errors_come_out_of_processes_with_little_memory(
    reader: str, corpus: Path
) -> None:
    results, failures = fuzz.fuzz(reader, COUNT, corpus)
    assert failures == []
    assert results.total() == COUNT
    assert results["read"] < COUNT


@pytest.mark.parametrize("reader", fuzz.READERS)
def test_readers_accept_the_files_as_written(
    reader: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that fails on good files would prove nothing."""
    copy = lambda rng, source, path: path.write_bytes(source.read_bytes())  # noqa: E731
    unchanged = {
        "mutate_checkpoint": copy,
        "mutate_onnx": copy,
        "mutate_json": lambda rng, text: text,
        "mutate_bytes": lambda rng, data: data,
    }
    for name, function in unchanged.items():
        monkeypatch.setattr(fuzz, name, function)
    assert fuzz.attempt(reader, 0, corpus) == "read"


def test_other_errors_and_endless_readers_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(rng: Random, folder: Path) -> None:
        raise ConfigError("expected")

    def unnamed(rng: Random, folder: Path) -> None:
        raise KeyError("modules")

    def endless(rng: Random, folder: Path) -> None:
        while True:
            pass

    for name, reader in (("named", named), ("unnamed", unnamed), ("endless", endless)):
        monkeypatch.setitem(fuzz.READERS, name, reader)
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    assert fuzz.attempt("named", 0, tmp_path) == "ConfigError"
    assert fuzz.attempt("unnamed", 0, tmp_path).startswith("FAIL: KeyError")
    assert fuzz.attempt("endless", 0, tmp_path) == "FAIL: more than 1 s"


def test_a_number_names_one_mutation() -> None:
    data = {"modules": {"a": [1, 2.0, "x"]}, "version": 1}
    first, second = (
        fuzz_mutations.mutate_data(Random("load:3"), data) for _ in range(2)
    )
    assert repr(first) == repr(second) != repr(data)
    assert data == {"modules": {"a": [1, 2.0, "x"]}, "version": 1}
