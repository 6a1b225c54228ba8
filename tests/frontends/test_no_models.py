"""Files that downloads leave in place of a model are named for what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.errors import TorchqError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n"
PAGE = "\n<!DOCTYPE html>\n<html><body>404</body></html>\n"

READERS: dict[str, Callable[[str], Any]] = {
    "load": lambda path: torchq.load(nn.Linear(2, 2), path),
    "verify_onnx": lambda path: torchq.verify_onnx(
        nn.Linear(2, 2), path, [torch.ones(1, 2)]
    ),
    "from_onnx": torchq.from_onnx,
    "from_caffe": lambda path: torchq.from_caffe(path, path),
}


@pytest.mark.parametrize("reader", READERS)
def test_pointers_and_pages_are_named(reader: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    for content, what in (
        (POINTER, "a pointer of Git LFS in place"),
        (PAGE, "a page of HTML in"),
    ):
        path = tmp_path / "model.bin"
        path.write_text(content)
        with pytest.raises(TorchqError, match=what):
            READERS[reader](str(path))
