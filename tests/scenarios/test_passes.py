"""The passes of fusing, lowering and export speak one language: each states what it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchq.fusion import passes as fusion
from torchq.graph import describe_pass
from torchq.lowering import passes as lowering
from torchq.onnx.passes import EXPORT_PASSES
from torchq.onnx.targets import OnnxTarget
from torchq.swap import TARGETS

LISTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "fusion": (*fusion.FIRST, *fusion.REPEATED),
    "lowering": (*lowering.INSERT_QDQ, *lowering.FUSE, *lowering.FINISH),
    "export": EXPORT_PASSES,
    "targets": tuple(
        rewrite
        for target in (TARGETS[name] for name in TARGETS)
        if isinstance(target, OnnxTarget)
        for rewrite in target.passes
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_every_pass_states_what_it_needs_and_leaves(name: str) -> None:
    for rewrite in LISTS[name]:
        info = describe_pass(rewrite)
        assert info.summary.endswith(".") and info.before and info.after, info.name
