"""What a device computed, beside the model: tensors that it wrote, compared in integer codes.

A device is somewhere else. :func:`expected_codes` writes a file to carry there, inputs and codes;
:func:`verify_dump` reads what came back and names the first tensor that differs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError, ExportError
from torchq.graph import call_arguments, call_model
from torchq.nn import TensorQuantizer
from torchq.nn.convert import float_name
from torchq.onnx.interface import nested_tensors
from torchq.onnx.ir import load_model
from torchq.onnx.qdq import path_of, quantizer_nodes
from torchq.utils import (
    check_batches,
    evaluating,
    kept_batches,
    network_of,
    replacing,
    table,
    untouched,
    watching,
    wrap,
)
from torchq.utils.optional import import_optional
from torchq.workflow import quantizers, weight_quantizers

_WHERE = "verify_dump"
#: Kernels of a device round sums in another way: some codes are off by one.
_SHARE = 0.05
_STEPS = 1
_SHOWN = 12
#: Names of the tensors of a quantizer in a file of export_onnx, and of what a tool makes of them.
_ENDINGS = ("", "/codes", "/value")
#: Endings of files that hold the numbers of a tensor and nothing else.
_RAW = (".raw", ".bin")

Layout = Literal["NCHW", "NHWC"]
Dumps = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True)
class DumpedTensor:
    """One tensor that a device wrote, beside the codes of the model.

    Attributes:
        name: the path of the quantizer whose codes it holds.
        source: its name in the dump.
        elements: how many there are.
        differing: how many have another code.
        steps: the largest difference of two codes.
        problem: why it cannot be compared; may be empty.
    """

    name: str
    source: str
    elements: int = 0
    differing: int = 0
    steps: int = 0
    problem: str = ""

    @property
    def share(self) -> float:
        """The part of the codes that differ."""
        return self.differing / self.elements if self.elements else 0.0

    def is_within(self, share: float, steps: int) -> bool:
        """Return True if the tensor differs by no more than this."""
        return not self.problem and self.share <= share and self.steps <= steps

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} ({self.source}): {self.problem}"
        return (
            f"{self.name} ({self.source}): {self.share:.2%} of {self.elements} codes differ, by up "
            f"to {self.steps}"
        )


@dataclass(frozen=True)
class DumpReport:
    """What :func:`verify_dump` found; ``print`` it.

    Attributes:
        tensors: those that were compared, in the order in which the model computes them.
        missing: paths of quantizers that the dump has no tensor of.
        unread: names in the dump that belong to no quantizer.
        share: how many codes of a tensor may differ, as a part.
        steps: by how much a code may differ.
    """

    tensors: tuple[DumpedTensor, ...]
    missing: tuple[str, ...]
    unread: tuple[str, ...]
    share: float
    steps: int

    @property
    def first(self) -> DumpedTensor | None:
        """The first tensor that differs by more than is allowed; None if there is none."""
        wrong = (t for t in self.tensors if not t.is_within(self.share, self.steps))
        return next(wrong, None)

    @property
    def ok(self) -> bool:
        """True if all tensors that were compared are within the bounds."""
        return self.first is None

    def __str__(self) -> str:
        bound = f"{self.share:.0%} of the codes off by {self.steps}"
        count = f"{len(self.tensors)} tensors"
        lines = [f"{count} of the device are those of the model, within {bound}"]
        if self.first is not None:
            lines = [f"NOT the model: the first tensor beyond {bound} is {self.first}"]
        if self.missing:
            lines.append(f"{len(self.missing)} quantizers have no tensor in the dump")
        rows = [("quantizer", "tensor", "codes", "differ", "by up to")]
        worst = sorted(self.tensors, key=lambda t: t.share, reverse=True)
        for tensor in worst[:_SHOWN]:
            figures = (f"{tensor.share:.2%}", str(tensor.steps))
            if tensor.problem:
                figures = (tensor.problem, "")
            row = (tensor.name, tensor.source, f"{tensor.elements:,}", *figures)
            rows.append(row)
        return "\n".join([*map(wrap, lines), table(rows)])


def expected_codes(
    model: nn.Module, batches: Sequence[object], path: str | os.PathLike[str]
) -> Path:
    """Write the codes that a model computes, and its inputs: a file to carry to a device.

    Args:
        model: quantized and calibrated; left unchanged.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
        path: an ``.npz`` file of NumPy; it is replaced whole or not at all. For batch ``n`` it has
            ``n/inputs/NAME``, and for each quantizer of an activation ``n/PATH``: the codes, with
            the zero point, as int32. ``PATH/scale`` and ``PATH/zero_point`` are float32 and int32.

    Returns:
        The path.

    Raises:
        ConfigError: the model has no quantizer, there is no batch, or the path does not end in
            ``.npz``.

    Example:
        >>> torchq.expected_codes(model, batches, "expected.npz")  # doctest: +SKIP
    """
    numpy = import_optional("numpy", "expected_codes")
    if Path(path).suffix != ".npz":
        raise ConfigError(
            f"expected_codes: got path={os.fspath(path)!r}; expected a name that ends in .npz"
        )
    model = network_of(model)
    check_batches("expected_codes", batches, None)
    arrays: dict[str, object] = {}
    for number, batch in enumerate(kept_batches("expected_codes", batches)):
        inputs = nested_tensors(model, *call_arguments(model, batch))
        for name, tensor in inputs.items():
            arrays[f"{number}/inputs/{name}"] = tensor.detach().cpu().numpy()
        for name, codes in _codes_of(model, batch, "expected_codes").items():
            arrays[f"{number}/{name}"] = codes.stored.to(torch.int32).numpy()
            arrays[f"{name}/scale"] = codes.scale.numpy()
            arrays[f"{name}/zero_point"] = codes.zero_point.to(torch.int32).numpy()
    with replacing(path) as (written,), open(written, "wb") as file:
        numpy.savez(file, **arrays)
    return Path(path)


def verify_dump(
    model: nn.Module,
    dumps: Dumps,
    batch: object,
    *,
    file: str | os.PathLike[str] | None = None,
    layout: Layout = "NCHW",
    share: float = _SHARE,
    steps: int = _STEPS,
) -> DumpReport:
    """Compare tensors that a device wrote with the codes of the model, layer by layer.

    Args:
        model: quantized and calibrated; left unchanged.
        dumps: tensors by name: a mapping, an ``.npz`` file, or a folder of ``.npy``, ``.raw`` and
            ``.bin`` files named after tensors, in which any character but letters and digits may
            be written as ``_``. A name is that of a quantizer, perhaps behind ``0/`` as in the
            files of :func:`expected_codes`, of its codes or values in a file of
            :func:`torchq.export_onnx`, or, with ``file``, of the tensor that it quantizes. Integers
            are taken for codes, floats for values.
        batch: the arguments of the call that the device computed.
        file: the ONNX file that the device runs, for the names of its other tensors.
        layout: of what the device wrote of images: ``"NHWC"`` has channels last.
        share: how many codes of a tensor may differ, as a part of them: kernels round sums in
            different ways.
        steps: by how much a code may differ.

    Returns:
        The tensors in the order of the model, and the first that differs; ``print`` it.

    Raises:
        ConfigError: the model has no quantizer, or an argument is invalid.
        ExportError: the dump cannot be read, or has no tensor of this model.

    Example:
        >>> torchq.verify_dump(model, "dumps/", batch, layout="NHWC")  # doctest: +SKIP
    """
    if not 0 <= share <= 1 or steps < 0:
        raise ConfigError(
            f"{_WHERE}: got share={share}, steps={steps}; expected a share from 0 to 1, and at "
            "least 0 steps"
        )
    if layout not in ("NCHW", "NHWC"):
        raise ConfigError(f"{_WHERE}: got layout={layout!r}; expected 'NCHW' or 'NHWC'")
    model = network_of(model)
    arrays = _read(dumps)
    expected = _codes_of(model, batch, _WHERE)
    names = {} if file is None else _names_in(Path(file))
    by_written_name = {_written(source): source for source in arrays}
    source_by_name: dict[str, str] = {}
    for name in expected:
        source = _source(name, names.get(name, ()), arrays, by_written_name)
        if source is not None:
            source_by_name[name] = source
    if not source_by_name:
        raise ExportError(
            f"{_WHERE}: got {_few(list(arrays))}; expected tensors of {float_name(model)}, such "
            f"as {_few(list(expected))}. It is a dump of another network, or pass file= for the "
            "names of its tensors"
        )
    tensors = tuple(
        _compared(name, source, arrays[source], expected[name], layout)
        for name, source in source_by_name.items()
    )
    missing = tuple(name for name in expected if name not in source_by_name)
    unread = tuple(sorted(arrays.keys() - set(source_by_name.values())))
    return DumpReport(tensors, missing, unread, share, steps)


@dataclass(frozen=True)
class _Codes:
    """The codes of one call of a quantizer, and what they stand for."""

    quantizer: TensorQuantizer
    stored: Tensor
    scale: Tensor
    zero_point: Tensor


def _codes_of(model: nn.Module, batch: object, where: str) -> dict[str, _Codes]:
    """Return the codes of each call of a quantizer of an activation, by name and in order."""
    of_weights = weight_quantizers(model)
    watched = {
        path: quantizer
        for path, quantizer in quantizers(model).items()
        if quantizer.quantizing and id(quantizer) not in of_weights
    }
    if not watched:
        raise ConfigError(
            f"{where}: {float_name(model)} has no quantizer of an activation; expected a "
            "quantized model"
        )
    for path, quantizer in watched.items():
        if not quantizer.descriptor.format.is_integer:
            raise ConfigError(
                f"{where}: {path}: has the format {quantizer.descriptor.format}; expected integer "
                "codes, which a device can write. Leave it out with torchq.disabled"
            )
    codes_by_name: dict[str, _Codes] = {}

    def note(path: str, args: Any, kwargs: object, output: object) -> None:
        quantizer = watched[path]
        x = args[0]
        x = quantizer.scaled(x)
        qparams = quantizer.qparams()
        zero = qparams.zero_point
        zero_point = torch.zeros_like(qparams.scale) if zero is None else zero
        numbers = (quantizer.codes(x), qparams.scale, zero_point)
        codes = _Codes(quantizer, *(t.detach().float().cpu() for t in numbers))
        calls = [name for name in codes_by_name if path_of(name) == path]
        # Of a tensor that several layers read through one quantizer a file has one.
        if not any(torch.equal(codes_by_name[c].stored, codes.stored) for c in calls):
            codes_by_name[f"{path}#{len(calls)}" if calls else path] = codes

    hooks = [(quantizer, partial(note, path)) for path, quantizer in watched.items()]
    with torch.no_grad(), untouched(model), evaluating(model), watching(hooks):
        call_model(model, batch)
    return codes_by_name


def _read(dumps: Dumps) -> dict[str, object]:
    """Return what a device wrote, as arrays by name; bytes of raw files."""
    numpy = import_optional("numpy", _WHERE)
    if isinstance(dumps, Mapping):
        return {
            str(name): _array(value)
            if isinstance(value, Tensor)
            else numpy.asarray(value)
            for name, value in dumps.items()
        }
    path = Path(dumps)
    try:
        if path.is_dir():
            return dict(_read_folder(numpy, path))
        with numpy.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, AttributeError) as error:
        raise ExportError(
            f"{_WHERE}: {path}: cannot be read ({error}); expected an .npz file, or a folder of "
            ".npy, .raw and .bin files"
        ) from error


def _array(tensor: Tensor) -> object:
    """Return a tensor as an array; NumPy has no bfloat16."""
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def _read_folder(numpy: Any, folder: Path) -> Iterator[tuple[str, object]]:
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder).with_suffix(""))
        if path.suffix == ".npy":
            yield name, numpy.load(path, allow_pickle=False)
        elif path.suffix in _RAW:
            yield name, path.read_bytes()


def _names_in(file: Path) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensor that each quantizer of a file reads, by quantizer."""
    return {
        name: (
            str(node.outputs[0].name),
            str(node.inputs[0].name),
        )
        for name, node in quantizer_nodes(load_model(file)).items()
    }


def _source(
    name: str,
    others: Sequence[str],
    arrays: Mapping[str, object],
    by_written_name: Mapping[str, str],
) -> str | None:
    """Return the name in a dump of a quantizer's tensor."""
    candidates = [*(f"{name}{ending}" for ending in _ENDINGS), *others]
    candidates += [f"0/{name}"]  # the first batch of what expected_codes writes
    exact = next((candidate for candidate in candidates if candidate in arrays), None)
    if exact is not None:
        return exact
    found = (by_written_name.get(_written(candidate)) for candidate in candidates)
    return next((source for source in found if source is not None), None)


def _written(name: str) -> str:
    """Return a name as files have it."""
    return re.sub(r"[^0-9A-Za-z]", "_", name).strip("_")


def _compared(
    name: str, source: str, array: Any, expected: _Codes, layout: Layout
) -> DumpedTensor:
    """Compare one tensor."""
    numpy = import_optional("numpy", _WHERE)
    shape = tuple(expected.stored.shape)
    count = expected.stored.numel()
    if isinstance(array, bytes):
        dtype = _dtype_of_raw(len(array), count, expected)
        if dtype is None:
            problem = f"has {len(array)} bytes; expected {count} numbers, as {shape}"
            return DumpedTensor(name, source, problem=problem)
        array = numpy.frombuffer(array, dtype)
    if array.dtype.kind not in "iuf":
        return DumpedTensor(name, source, problem=f"has the type {array.dtype}")
    if array.size != count:
        problem = f"has the shape {tuple(array.shape)}; expected {shape}"
        return DumpedTensor(name, source, problem=problem)
    if array.dtype.kind == "f" and not numpy.isfinite(array).all():
        return DumpedTensor(name, source, count, problem="holds NaN or infinity")
    values = _in_shape(torch.from_numpy(array.astype("float64")), shape, layout)
    if array.dtype.kind == "f":
        codes = _of_values(values, expected)
    else:
        codes = _of_codes(values, array.dtype, expected)
    gaps = (codes - expected.stored.double()).abs()
    largest = int(gaps.max()) if count else 0
    return DumpedTensor(name, source, count, int((gaps > 0).sum()), largest)


def _dtype_of_raw(size: int, count: int, expected: _Codes) -> str | None:
    """Return the type of numbers without a header, by how many bytes each has."""
    number_format = expected.quantizer.descriptor.format
    kind = "int" if number_format.signed else "uint"
    two_bytes = f"{kind}16" if number_format.bits > 8 else "float16"
    by_size = {1: f"{kind}8", 2: two_bytes, 4: "float32"}
    return by_size.get(size // count) if count and size % count == 0 else None


def _in_shape(values: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
    """Return values in the shape of the model."""
    if layout == "NHWC" and len(shape) == 4:
        count, channels, height, width = shape
        values = values.reshape(count, height, width, channels)
        return values.permute(0, 3, 1, 2)
    return values.reshape(shape)


def _of_values(values: Tensor, expected: _Codes) -> Tensor:
    """Return the codes that the quantizer has for values."""
    return expected.quantizer.codes(values.float()).double()


def _of_codes(codes: Tensor, dtype: Any, expected: _Codes) -> Tensor:
    """Return codes of a device as the model has them: one of both may store them unsigned."""
    number_format = expected.quantizer.descriptor.format
    if 8 * dtype.itemsize > max(number_format.bits, 8):
        return codes  # A wider type holds codes as they are.
    half = 2 ** (number_format.bits - 1)
    return codes + half * (int(dtype.kind == "i") - int(number_format.signed))


def _few(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "no tensor"
