"""The passes of fusing, lowering and export speak one language: each states what it needs."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from torchq.fusion import api as fusion
from torchq.lowering.fuse import RULES
from torchq.lowering.known_forms import KNOWN_FORMS
from torchq.onnx.passes import EXPORT_PASSES
from torchq.runtimes import RUNTIMES

LISTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "fusion": fusion.PASSES,
    "lowering": (*KNOWN_FORMS, *RULES),
    "export": EXPORT_PASSES,
    "runtimes": tuple(
        rewrite
        for runtime in RUNTIMES.values()
        if runtime.file
        for rewrite in runtime.file.passes
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_every_pass_states_what_it_needs_and_leaves(name: str) -> None:
    for rewrite in LISTS[name]:
        message = inspect.getdoc(getattr(rewrite, "do", rewrite)) or ""
        assert message.partition("\n")[0].endswith("."), rewrite.__name__
        assert "Before:" in message and "After:" in message, rewrite.__name__
