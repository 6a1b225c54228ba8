"""Fixtures of every test and doctest; seeds and threads are as before when a test has ended."""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
import torch

import torchq
from tests.leaks import left_behind, remains, settings_are_torchs_own
from torchq.lowering.kernel import saturates

with suppress(ImportError):
    import openvino  # noqa: F401  # Its import starts a thread, which no test is to be blamed for.

pytest_plugins = ["pytester", "tests.slow"]


@pytest.fixture(scope="session", autouse=True)
def session_settings(
    tmp_path_factory: pytest.TempPathFactory, doctest_namespace: dict[str, Any]
) -> Iterator[None]:
    """Set what every test finds: one thread, a wide terminal and an empty temporary folder.

    pytest-xdist already keeps every core busy, so each process uses one torch thread. Reports are
    printed as wide as they are, whatever window the tests run in. Doctests use ``torch`` and
    ``torchq`` without importing them. Inductor compiles in this process, and keeps what it made for
    the next session.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    doctest_namespace.update(torch=torch, torchq=torchq)
    # Made now, it lies outside of what pytest removes before multiprocessing removes it at exit.
    get_temp_dir()
    compiled = str(Path(tempfile.gettempdir(), "torchq-tests-inductor"))
    temporary = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "400")
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        patch.setenv(
            "TORCHINDUCTOR_CACHE_DIR",
            os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled),
        )
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", temporary)
        share_operators_of_exporters(patch)
        yield
    torch.set_num_threads(threads)


def share_operators_of_exporters(patch: pytest.MonkeyPatch) -> None:
    """Let all exports by dynamo in this process read one list of onnxscript's operators.

    torch asks for that list in each export, and onnxscript then reads the source of 500 functions
    again, which is a third of the time of a small export. Nothing in the list depends on the model.
    """
    with suppress(ImportError):
        apis = importlib.import_module("onnxscript._framework_apis.torch_2_5")
        patch.setattr(apis, "get_torchlib_ops", functools.cache(apis.get_torchlib_ops))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Seed torch's generators, and fail a test that leaves anything behind: see tests/leaks.py.

    The state of the generators is restored, so that test order cannot matter.
    """
    before = remains()
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    # torch.manual_seed writes down who called it for each kind of device that is not in use.
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    yield
    torch.set_rng_state(state)
    settings_are_torchs_own()
    left = left_behind(before)
    assert not left, f"the test left {sorted(left)}; files belong in tmp_path"


def pytest_configure(config: pytest.Config) -> None:
    """Let tests deploy models on CPUs without VNNI, where `deploy` warns of overflow."""
    config.addinivalue_line(
        "filterwarnings", "ignore:deploy. this CPU has no VNNI:UserWarning"
    )


MAY_OVERFLOW = pytest.mark.xfail(
    reason="this CPU has no VNNI, its kernels overflow", strict=False
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests with weights of 8 bits fail where torchq says that kernels overflow with them.

    tests/runtimes/test_saturation.py checks that it knows such CPUs, and that `deploy` says so.
    """
    if not saturates():
        return
    for item in items:
        marker = item.get_closest_marker("eight_bit_products")
        if marker and all(word in item.name for word in marker.args):
            item.add_marker(MAY_OVERFLOW)
