"""Readers of other frameworks' files, for :mod:`benchmarks.fuzz_files`.

ONNX files are those that torchq exports and small ones that PyTorch exported years ago, of the
package onnx; those of MXNet and Caffe are the files of the tests. Bytes are mutated, and the graphs
of ONNX files and the text of symbols and networks.

Example:
    python -m benchmarks.fuzz_files --readers from_onnx from_onnx_old mxnet_symbol mxnet_params \
        caffe_network caffe_weights --count 6000 --out benchmarks/results/fuzz_readers.jsonl
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import torchq
from benchmarks.fuzz_mutations import mutate_bytes, mutate_json, mutate_onnx

__all__ = ["FRAMEWORK_READERS"]

FILES = Path(__file__).parents[1] / "tests" / "frontends"
OLD = (
    "test_BatchNorm2d_eval", "test_Conv2d_groups", "test_ConvTranspose2d", "test_Embedding",
    "test_Linear", "test_MaxPool2d_stride_padding_dilation", "test_PReLU_2d", "test_Softmin",
)  # fmt: skip


def read_onnx(rng: Random, folder: Path) -> None:
    """Read a mutated file of torchq's own export."""
    path = folder / "mutated.onnx"
    mutate_onnx(rng, folder / f"{rng.choice(['int8', 'onnxruntime'])}.onnx", path)
    torchq.from_onnx(path)


def read_old_onnx(rng: Random, folder: Path) -> None:
    """Read a mutated file that PyTorch exported years ago."""
    import onnx

    models = Path(onnx.__file__).parent / "backend" / "test" / "data" / "pytorch-converted"
    path = folder / "mutated.onnx"
    mutate_onnx(rng, models / rng.choice(OLD) / "model.onnx", path)
    torchq.from_onnx(path)


def _mxnet(rng: Random) -> tuple[str, bytes]:
    name = rng.choice(["classifier", "convolutions", "movement", "slices"])
    symbol = FILES / "mxnet_files" / f"{name}-symbol.json"
    params = FILES / "mxnet_files" / f"{name}-0000.params"
    return symbol.read_text(encoding="utf-8"), params.read_bytes()


def read_symbol(rng: Random, folder: Path) -> None:
    """Read a mutated symbol of MXNet."""
    symbol, params = _mxnet(rng)
    path = folder / "mutated-symbol.json"
    path.write_text(mutate_json(rng, symbol), encoding="utf-8")
    torchq.from_mxnet(path, params)


def read_params(rng: Random, folder: Path) -> None:
    """Read mutated arrays of MXNet."""
    symbol, params = _mxnet(rng)
    torchq.from_mxnet(symbol, mutate_bytes(rng, params))


def _caffe(rng: Random) -> tuple[bytes, bytes]:
    name = rng.choice(["classifier", "detector", "operators"])
    paths = (FILES / "caffe_files" / f"{name}.{end}" for end in ("prototxt", "caffemodel"))
    network, weights = (path.read_bytes() for path in paths)
    return network, weights


def read_network(rng: Random, folder: Path) -> None:
    """Read a mutated network of Caffe."""
    network, weights = _caffe(rng)
    path = folder / "mutated.prototxt"
    path.write_bytes(mutate_bytes(rng, network))
    torchq.from_caffe(path, weights)


def read_weights(rng: Random, folder: Path) -> None:
    """Read mutated weights of Caffe."""
    network, weights = _caffe(rng)
    torchq.from_caffe(network.decode(), mutate_bytes(rng, weights))


FRAMEWORK_READERS: dict[str, Callable[[Random, Path], None]] = {
    "from_onnx": read_onnx,
    "from_onnx_old": read_old_onnx,
    "mxnet_symbol": read_symbol,
    "mxnet_params": read_params,
    "caffe_network": read_network,
    "caffe_weights": read_weights,
}
