"""Files that must not be loaded are refused by a named error and leave the model as it was."""

from __future__ import annotations

import copy
import io
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.serialization import config

import torchq
from torchq.errors import ConfigError, FuseError, QuantizationError, TorchqError
from torchq.swap import plan_of
from torchq.workflow import quantizers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.second(x)


X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def quantized(config: torchq.QuantConfig | None = None, target: str | None = "openvino") -> Net:
    model = Net().eval()
    torchq.quantize_(model, config, target=target, example=X)
    torchq.calibrate(model, [X], progress=False)
    return model


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """What torchq.save writes."""
    model = quantized()
    return {"torchq": plan_of(model).to_dict(), "state_dict": model.state_dict()}


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes and tensors; equal before and after a call that changed nothing."""
    modules = {name: (type(m), sorted(vars(m))) for name, m in model.named_modules()}
    modes = {name: q.mode for name, q in quantizers(model).items()}
    tensors = {key: value.tolist() for key, value in model.state_dict().items()}
    return {"modules": modules, "modes": modes, "tensors": tensors}


def refused(data: Any, path: Path, error: type[Exception], text: str) -> None:
    """Assert that a file with ``data`` is refused by a float and by a quantized model."""
    torch.save(data, path)
    for model in (Net().eval(), quantized(torchq.recipes.w4a4(), target=None)):
        before = snapshot(model)
        with pytest.raises(error, match=text):
            torchq.load(model, path)
        assert snapshot(model) == before


def operators(data: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = data["torchq"]["operators"][""]
    return entry


def rename_child(data: dict[str, Any], name: str) -> None:
    entry = operators(data)
    entry["sites"] = dict.fromkeys(entry["sites"], name)
    row = next(row for row in data["torchq"]["decisions"] if row["names"] == ["quant_add"])
    row["names"] = [name]


def set_entry(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


RECORD, STATE = "torchq", "state_dict"
AMAX, WEIGHT_AMAX = "first.input_quantizer.amax", "first.weight_quantizer.amax"
BAD: dict[str, tuple[Callable[[dict[str, Any]], None], type[Exception], str]] = {
    "no version": (drop(RECORD, "version"), ConfigError, "record: got .*; expected the entries"),
    "version as text": (set_entry(RECORD, "version", value="2"), ConfigError, "version: got '2'"),
    "version as bool": (set_entry(RECORD, "version", value=True), ConfigError, "version"),
    "no decisions": (drop(RECORD, "decisions"), ConfigError, "expected the entries"),
    "unknown entry": (set_entry(RECORD, "more", value={}), ConfigError, "expected the entries"),
    "record is a list": (set_entry(RECORD, value=[1]), ConfigError, "record: got"),
    "decisions are a mapping": (
        set_entry(RECORD, "decisions", value={}),
        ConfigError,
        "decisions: got {}; expected a list",
    ),
    "layer is None": (
        set_entry(RECORD, "decisions", 0, value=None),
        ConfigError,
        r"decisions\[0\]: got None",
    ),
    "number as path": (
        set_entry(RECORD, "decisions", 0, "names", value=[3]),
        ConfigError,
        r"decisions\[0\]\.names: got \[3\]; expected a list of one or more paths",
    ),
    "no path": (
        set_entry(RECORD, "decisions", 0, "names", value=[]),
        ConfigError,
        r"decisions\[0\]\.names: got \[\]",
    ),
    "layer has another slot": (
        set_entry(RECORD, "decisions", 0, "result", value={}),
        ConfigError,
        "expected the entries names, class, input, weight, output",
    ),
    "unknown field": (
        set_entry(RECORD, "decisions", 0, "input", value={"bits": 8}),
        ConfigError,
        r"decisions\[0\] of 'first'\.input: .*bits",
    ),
    "bits of another planet": (
        set_entry(RECORD, "decisions", 0, "input", value={"num_bits": 10**30}),
        ConfigError,
        "first",
    ),
    "reason is a number": (
        set_entry(RECORD, "decisions", 0, "reason", value=3),
        ConfigError,
        r"'first'\.reason: got 3; expected a string",
    ),
    "unknown module": (
        set_entry(RECORD, "decisions", 0, "names", value=["third"]),
        QuantizationError,
        "third: got no such module",
    ),
    "another class": (
        set_entry(RECORD, "decisions", 0, "class", value="os.system"),
        QuantizationError,
        "first: got torch.nn.modules.conv.Conv2d; expected os.system",
    ),
    "work is endless": (
        set_entry(RECORD, "work", "amounts", "first", value=float("inf")),
        ConfigError,
        r"work\.amounts\['first'\]: got inf; expected a number >= 0",
    ),
    "work of nobody": (
        set_entry(RECORD, "work", "amounts", value={}),
        ConfigError,
        "work: got .*; expected a class for each amount",
    ),
    "unknown mode": (
        set_entry(RECORD, "modes", "first.input_quantizer", value="loud"),
        ConfigError,
        "modes.*'loud'",
    ),
    "mode of nobody": (
        set_entry(RECORD, "modes", "nobody", value="off"),
        QuantizationError,
        "nobody: is no quantizer of the model",
    ),
    "shared alone": (set_entry(RECORD, "shared", value=[["a"]]), ConfigError, "shared: got"),
    "shared nobody": (set_entry(RECORD, "shared", value=[["a", "b"]]), QuantizationError, "share"),
    "placed quantizer": (
        set_entry(RECORD, "placed", value=[]),
        ConfigError,
        "placed: got",
    ),
    "operator without decision": (
        drop(RECORD, "decisions", -1),
        QuantizationError,
        "no operator for quant_add",
    ),
    "one child for two operators": (
        set_entry(RECORD, "operators", "", "sites", value={"a": "quant_add", "b": "quant_add"}),
        ConfigError,
        "every child once",
    ),
    "unknown operator": (
        set_entry(RECORD, "decisions", -1, "class", value="os.System"),
        QuantizationError,
        "no operator for quant_add",
    ),
    "child in the way": (lambda d: rename_child(d, "first"), QuantizationError, "has an attribute"),
    "child is forward": (lambda d: rename_child(d, "forward"), QuantizationError, "an attribute"),
    "child is a keyword": (lambda d: rename_child(d, "class"), ConfigError, "identifiers"),
    "child is code": (
        lambda d: rename_child(d, 'z", None) or print("owned") or getattr(self, "0'),
        ConfigError,
        "expected names that are Python identifiers",
    ),
    "fusions is a mapping": (
        set_entry(RECORD, "fusions", value={}),
        ConfigError,
        "fusions: got {}; expected a list",
    ),
    "unknown fusion": (
        set_entry(RECORD, "fusions", value=[{"kind": "magic"}]),
        ConfigError,
        "magic",
    ),
    "fusion of nobody": (
        set_entry(
            RECORD,
            "fusions",
            value=[
                {"kind": "batchnorm", "norms": ["x"], "layers": ["first"], "constant_pad": False}
            ],
        ),
        FuseError,
        "x",
    ),
    "no state": (drop(STATE), ConfigError, "got no 'state_dict'"),
    "state is a list": (set_entry(STATE, value=[]), ConfigError, "got no 'state_dict'"),
    "tensor missing": (drop(STATE, "first.bias"), QuantizationError, "first.bias is missing"),
    "tensor too many": (
        set_entry(STATE, "third.bias", value=torch.ones(1)),
        QuantizationError,
        "third.bias is not expected",
    ),
    "tensor misshapen": (
        set_entry(STATE, "second.weight", value=torch.ones(4, 4, 3, 3)),
        QuantizationError,
        r"second.weight has shape \(4, 4, 3, 3\), not \(4, 4, 1, 1\)",
    ),
    "tensor is text": (
        set_entry(STATE, "second.weight", value="text"),
        QuantizationError,
        "second.weight is a str",
    ),
    "complex weight": (
        set_entry(STATE, "second.bias", value=torch.ones(4, dtype=torch.complex64)),
        QuantizationError,
        "second.bias has the type torch.complex64",
    ),
    "sparse weight": (
        set_entry(STATE, "second.bias", value=torch.ones(4).to_sparse()),
        QuantizationError,
        "second.bias is not a dense tensor",
    ),
    "amax missing": (drop(STATE, AMAX), QuantizationError, f"{AMAX} is missing"),
    "amax complex": (
        set_entry(STATE, AMAX, value=torch.tensor(1j)),
        QuantizationError,
        f"{AMAX} has the type",
    ),
    "amax sparse": (
        set_entry(STATE, WEIGHT_AMAX, value=torch.ones(4, 1, 1, 1).to_sparse()),
        QuantizationError,
        "is not a dense tensor",
    ),
    "amax integer": (
        set_entry(STATE, AMAX, value=torch.tensor(1)),
        ConfigError,
        "expected a floating-point tensor",
    ),
    "amax misshapen": (
        set_entry(STATE, AMAX, value=torch.ones(7)),
        ConfigError,
        r"amax has shape \(7,\); expected one value",
    ),
    "amax repeated to a terabyte": (
        set_entry(STATE, AMAX, value=torch.ones(1).expand(2**40)),
        QuantizationError,
        rf"{AMAX} repeats its numbers to the shape",
    ),
    "weight amax misshapen": (
        set_entry(STATE, WEIGHT_AMAX, value=torch.ones(3, 1, 1, 1)),
        ConfigError,
        rf"{WEIGHT_AMAX}: amax has shape \(3, 1, 1, 1\)",
    ),
    "amax empty and misshapen": (
        set_entry(STATE, AMAX, value=torch.ones(0, 3)),
        ConfigError,
        "expected a range",
    ),
}
FACTORS = "first.input_quantizer.pre_quant_scale"
BAD_FACTORS: dict[str, tuple[Any, type[Exception], str]] = {
    "text": ("3", QuantizationError, "is a str, not a tensor"),
    "a list": ([1.0], QuantizationError, "is a list, not a tensor"),
    "None": (None, QuantizationError, "is a NoneType, not a tensor"),
    "sparse": (torch.ones(3, 1, 1).to_sparse(), QuantizationError, "is not a dense tensor"),
    "complex": (torch.ones(3, 1, 1) * 1j, QuantizationError, "has the type torch.complex64"),
    "integer": (torch.ones(3, 1, 1, dtype=torch.int32), ConfigError, "got torch.int32"),
    "repeated": (torch.ones(1).expand(2**40), QuantizationError, "repeats its numbers"),
    "zero": (torch.zeros(3, 1, 1), ConfigError, "got zero, negative, NaN or infinite values"),
    "negative": (torch.tensor(-1.0), ConfigError, "got zero, negative, NaN or infinite values"),
    "NaN": (torch.tensor(float("nan")), ConfigError, "got zero, negative, NaN or infinite"),
    "for 5 channels": (torch.ones(5), ConfigError, r"got shape \(5,\); expected .* \(3, 1, 1\)"),
    "for columns": (torch.ones(3), ConfigError, r"got shape \(3,\)"),
    "for images": (torch.ones(2, 3, 1, 1), ConfigError, r"got shape \(2, 3, 1, 1\)"),
    "empty": (torch.ones(0), ConfigError, r"got shape \(0,\)"),
}
for name, (factors, error, text) in BAD_FACTORS.items():
    BAD[f"factors {name}"] = set_entry(STATE, FACTORS, value=factors), error, f"{FACTORS}:? {text}"
for value in (float("nan"), float("inf"), -1.0, 1e39):
    tensor = torch.tensor(value, dtype=torch.float64)
    text = f"{AMAX}: got negative, NaN or infinite values"
    BAD[f"amax {value}"] = (set_entry(STATE, AMAX, value=tensor), ConfigError, text)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_and_change_nothing(
    name: str, data: dict[str, Any], tmp_path: Path
) -> None:
    change, error, text = BAD[name]
    bad = copy.deepcopy(data)
    change(bad)
    refused(bad, tmp_path / "bad.pt", error, text)


def test_names_in_a_file_are_never_run(data: dict[str, Any], tmp_path: Path) -> None:
    """The name of a child became part of generated code, which ran at the first forward."""
    mark = tmp_path / "owned"
    code = list(f"open({str(mark)!r}, 'w')".encode())
    bad = copy.deepcopy(data)
    rename_child(bad, f'z", None) or exec(bytes({code})) or getattr(self, "0')
    torch.save(bad, tmp_path / "bad.pt")
    model = Net().eval()
    with pytest.raises(ConfigError):
        torchq.load(model, tmp_path / "bad.pt")
    model(X)
    assert not mark.exists()


def test_bytes_changed_at_random_give_named_errors(data: dict[str, Any], tmp_path: Path) -> None:
    """A short version of a fuzz run; many of these files are whole archives with other numbers."""
    buffer = io.BytesIO()
    torch.save(data, buffer)
    good, source = buffer.getvalue(), random.Random(0)
    model = Net().eval()
    before = snapshot(model)
    for number in range(60):
        bad = bytearray(good)
        for _ in range(source.randint(1, 20)):
            bad[source.randrange(len(bad))] = source.randrange(256)
        (tmp_path / "bad.pt").write_bytes(
            bytes(bad[: source.randrange(len(bad))] if number % 3 == 0 else bad)
        )
        try:
            torchq.load(model, tmp_path / "bad.pt")
        except TorchqError:
            assert snapshot(model) == before
        else:
            torchq.restore_(model)
            model.load_state_dict(Net().state_dict())
            before = snapshot(model)


def test_a_changed_bit_of_the_numbers_is_found(data: dict[str, Any], tmp_path: Path) -> None:
    torch.save(data, tmp_path / "good.pt")
    good, source = (tmp_path / "good.pt").read_bytes(), random.Random(0)
    expected = {key: value.clone() for key, value in data[STATE].items()}
    for key in ("first.weight", "second.bias", AMAX):
        place = good.index(data[STATE][key].flatten()[:1].numpy().tobytes())
        bad = bytearray(good)
        bad[place] ^= 1 << source.randrange(8)
        (tmp_path / "bad.pt").write_bytes(bad)
        model = Net().eval()
        before = snapshot(model)
        with pytest.raises(ConfigError, match=r"bad\.pt: cannot be read .*Bad CRC-32"):
            torchq.load(model, tmp_path / "bad.pt")
        assert snapshot(model) == before
    for _ in range(60):
        bad = bytearray(good)
        bad[source.randrange(len(bad))] ^= 1 << source.randrange(8)
        (tmp_path / "bad.pt").write_bytes(bad)
        model = Net().eval()
        try:
            torchq.load(model, tmp_path / "bad.pt")
        except TorchqError:
            continue
        found = model.state_dict()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_files_without_checksums_are_read(data: dict[str, Any], tmp_path: Path) -> None:
    """The one of torch is optional, and its format without an archive has none."""
    with config.patch({"save.compute_crc32": False}):
        torch.save(data, tmp_path / "none.pt")
    torch.save(data, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("none.pt", "old.pt"):
        found = torchq.load(Net().eval(), tmp_path / name).state_dict()
        assert all(torch.equal(found[key], value) for key, value in data[STATE].items())


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    torchq.save(quantized(), tmp_path / "good.pt")
    with (
        zipfile.ZipFile(tmp_path / "good.pt") as good,
        zipfile.ZipFile(tmp_path / "bad.pt", "w", zipfile.ZIP_DEFLATED) as bad,
    ):
        for part in good.infolist():
            zeros = bytes(1 << 25) if part.filename.endswith("data/0") else good.read(part)
            bad.writestr(part.filename, zeros)
    with pytest.raises(ConfigError, match=r"\d+ bytes unpack to \d+, but torch.save does not"):
        torchq.load(Net(), tmp_path / "bad.pt")


def test_factors_of_the_input_are_those_of_the_file(tmp_path: Path) -> None:
    """Also if the model has others, or some where the file has none."""
    model = quantized()
    torchq.save(model, tmp_path / "plain.pt")
    scaled = quantized()
    scaled.first.input_quantizer.pre_quant_scale = torch.tensor([1.0, 2.0, 0.5]).view(3, 1, 1)
    torchq.save(scaled, tmp_path / "scaled.pt")
    other = quantized()
    other.first.input_quantizer.pre_quant_scale = torch.tensor(3.0)
    for into in (Net().eval(), other):
        assert torch.equal(torchq.load(into, tmp_path / "scaled.pt")(X), scaled(X))
        assert torch.equal(torchq.load(into, tmp_path / "plain.pt")(X), model(X))


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        torchq.load(Net(), tmp_path / "none.pt")


def test_an_interruption_while_tensors_are_copied_changes_nothing(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(data, tmp_path / "m.pt")
    model = Net().eval()
    before = snapshot(model)
    original, calls = nn.Conv2d._load_from_state_dict, []

    def load(self: Any, *args: Any) -> None:
        calls.append(1)
        original(self, *args)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(nn.Conv2d, "_load_from_state_dict", load)
    with pytest.raises(KeyboardInterrupt):
        torchq.load(model, tmp_path / "m.pt")
    monkeypatch.undo()
    assert snapshot(model) == before


@pytest.mark.parametrize("entry", ["unsigned", "amax"])
def test_a_tensor_without_numbers_is_refused(entry: str, tmp_path: Path) -> None:
    """A file can say that a tensor is on the device "meta", where nothing can be read."""
    model = nn.Sequential(nn.Linear(4, 4))
    torchq.quantize_(model, torchq.recipes.integer(4, 4))
    torchq.calibrate(model, [torch.rand(8, 4)], progress=False)
    torchq.save(model, tmp_path / "good.pt")
    bad = torch.load(tmp_path / "good.pt", weights_only=True)
    name = f"0.input_quantizer.{entry}"
    bad["state_dict"][name] = bad["state_dict"][name].to("meta")
    torch.save(bad, tmp_path / "bad.pt")
    fresh = nn.Sequential(nn.Linear(4, 4))
    before = fresh[0].weight.detach().clone()
    with pytest.raises(TorchqError, match=re.escape(name)):
        torchq.load(fresh, tmp_path / "bad.pt")
    assert type(fresh[0]) is nn.Linear and torch.equal(fresh[0].weight, before)
