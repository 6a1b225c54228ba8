"""Mutated files: a reader returns a model or raises one named error, whatever the bytes."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import torchq
from tests.frontends.test_mxnet import in_dialect_of_version_8
from torchq.errors import TorchqError

FOLDER = Path(__file__).parent
COUNT = 150  # mutations of each file


def mutated(data: bytes, random: Random) -> bytes:
    """Return a file with one to four changes: bytes, cuts, repeats, and extreme numbers."""
    out = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(out) or 1)
        kind = random.randrange(5)
        if kind == 0 and out:
            out[at] = random.randrange(256)
        elif kind == 1:
            del out[at : at + random.randint(1, 40)]
        elif kind == 2:
            out[at:at] = out[at : at + random.randint(1, 40)]
        elif kind == 3:
            extreme = random.choice(
                [b"\xff" * 8, b"\x00" * 8, b"\x7f" * 4, b"-1", b"9" * 20]
            )
            out[at : at + len(extreme)] = extreme
        else:
            del out[at:]
    return bytes(out)


def read_symbol(data: bytes) -> Any:
    message = data.decode("utf-8", "replace")
    return torchq.from_mxnet(
        message if message.lstrip()[:1] == "{" else "{" + message, PARAMS
    )


SYMBOL = (FOLDER / "mxnet_files" / "classifier-symbol.json").read_bytes()
PARAMS = (FOLDER / "mxnet_files" / "classifier-0000.params").read_bytes()
NETWORK = (FOLDER / "caffe_files" / "classifier.prototxt").read_bytes()
MODEL = (FOLDER / "caffe_files" / "classifier.caffemodel").read_bytes()
OLD = in_dialect_of_version_8(SYMBOL.decode()).encode()
READERS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "symbol": (SYMBOL, read_symbol),
    "old symbol": (OLD, read_symbol),
    "params": (PARAMS, lambda data: torchq.from_mxnet(SYMBOL.decode(), data)),
    "prototxt": (
        NETWORK,
        lambda data: torchq.from_caffe(data.decode("utf-8", "replace"), MODEL),
    ),
    "caffemodel": (MODEL, lambda data: torchq.from_caffe(NETWORK.decode(), data)),
    "onnx": (b"", torchq.from_onnx),
}


def onnx_file() -> bytes:
    pytest.importorskip("onnx", reason="writes the file")
    from tests.frontends.onnx_writer import Writer

    w = Writer(13)
    y = w.node("Relu", w.conv(w.input("x", [1, 3, 8, 8]), 3, 4))
    y = w.node(
        "MaxPool",
        y,
        kernel_shape=[2, 2],
        strides=[2, 2],
    )
    return bytes(w.model(y).SerializeToString())


@pytest.mark.parametrize("name", READERS)
def test_mutated_files_give_named_errors(name: str) -> None:
    data, read = READERS[name]
    data, refused = data or onnx_file(), 0
    for number in range(COUNT):
        changed = mutated(data, Random(f"{name} {number}"))
        try:
            read(changed)
        except TorchqError:
            refused += 1
        except Exception as error:
            pytest.fail(f"mutation {number}: {type(error).__name__}: {error}")
    assert refused > COUNT // 10


def test_names_that_are_no_text_are_refused() -> None:
    onnx = pytest.importorskip("onnx", reason="writes the file")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])], "abcd", [], []
    )
    data = (
        onnx.helper.make_model(graph)
        .SerializeToString()
        .replace(b"abcd", b"ab\xff\xfe")
    )
    with pytest.raises(
        TorchqError, match=r"expected names in UTF-8|cannot be read as ONNX"
    ):
        torchq.from_onnx(data)
