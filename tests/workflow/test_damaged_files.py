"""Loading makes a model what was saved; damaged and foreign files change nothing."""

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
from tests.models import simulated
from torchq import QuantDescriptor
from torchq.errors import ConfigError, FuseError, QuantizationError, TorchqError
from torchq.swap import plan_of
from torchq.workflow import quantizers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.second = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.second(x)


X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def quantized(
    config: torchq.QuantConfig | None = None, target: str | None = "openvino"
) -> Net:
    return simulated(Net().eval(), [X], config, target=target, example=X)


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
    row = next(
        row for row in data["torchq"]["decisions"] if row["names"] == ["quant_add"]
    )
    row["names"] = [name]


#: Stands for an entry that is taken away.
GONE = object()


def change(data: Any, path: str, value: Any) -> None:
    """Set an entry of nested dictionaries and lists, or delete it."""
    *parents, last = (
        int(key) if key.lstrip("-").isdigit() else key for key in path.split("/")
    )
    for key in parents:
        data = data[key]
    if value is GONE:
        del data[last]
    else:
        data[last] = value


AMAX, WEIGHT_AMAX = "first.input_quantizer.amax", "first.weight_quantizer.amax"
FACTORS = "first.input_quantizer.pre_quant_scale"
FUSION = {
    "kind": "batchnorm",
    "norms": ["x"],
    "layers": ["first"],
    "constant_pad": False,
}
BAD_RECORDS: list[tuple[str, Any, str]] = [
    ("version", GONE, "version: got None; expected 3"),
    ("version", "2", "version: got '2'"),
    ("version", True, "version"),
    ("version", 99, r"got a record of version 99; expected 3\. Quantize the float"),
    ("decisions", GONE, "expected the entries"),
    ("more", {}, "expected the entries"),
    ("decisions", {}, "decisions: got {}; expected a list"),
    ("decisions/0", None, r"decisions\[0\]: got None"),
    ("decisions/0/names", [3], r"names\[0\]: got 3; expected a string"),
    ("decisions/0/names", [], r"decisions\[0\]\.names: got \[\]"),
    (
        "decisions/0/result",
        {},
        "expected the entries names, class, input, weight, output",
    ),
    ("decisions/0/input", {"bits": 8}, r"decisions\[0\]\.input: .*bits"),
    ("decisions/0/input", {"num_bits": 10**30}, r"decisions\[0\]\.input"),
    ("decisions/0/reason", 3, r"decisions\[0\]\.reason: got 3; expected a string"),
    ("work/amounts/first", float("inf"), r"got inf; expected a number >= 0"),
    ("work/amounts", {}, "work: got .*; expected a class for each amount"),
    ("modes/first.input_quantizer", "loud", "modes.*'loud'"),
    ("shared", [["a"]], "shared: got"),
    ("placed", [], "placed: got"),
    ("operators//sites", {"a": "quant_add", "b": "quant_add"}, "every child once"),
    ("fusions", {}, "fusions: got {}; expected a list"),
    ("fusions", [{"kind": "magic"}], "magic"),
]
RECORDS_OF_ANOTHER_MODEL: list[tuple[str, Any, str]] = [
    ("decisions/0/names", ["third"], "third: got no such module"),
    ("decisions/0/class", "os.system", "first: got torch.*; expected os.system"),
    ("modes/nobody", "off", "nobody: is no quantizer of the model"),
    ("shared", [["a", "b"]], "share"),
    ("decisions/-1", GONE, "no operator for quant_add"),
    ("decisions/-1/class", "os.System", "no operator for quant_add"),
]
TENSORS_OF_ANOTHER_MODEL: list[tuple[str, Any, str]] = [
    ("first.bias", GONE, "first.bias is missing"),
    ("third.bias", torch.ones(1), "third.bias is not expected"),
    (
        "second.weight",
        torch.ones(4, 4, 3, 3),
        r"has shape \(4, 4, 3, 3\), not \(4, 4, 1, 1\)",
    ),
    ("second.weight", "text", "second.weight is a str"),
    ("second.bias", torch.ones(4) * 1j, "second.bias has the type torch.complex64"),
    ("second.bias", torch.ones(4).to_sparse(), "second.bias is not a dense tensor"),
    (AMAX, GONE, f"{AMAX} is missing"),
    (AMAX, torch.tensor(1j), f"{AMAX} has the type"),
    (WEIGHT_AMAX, torch.ones(4, 1, 1, 1).to_sparse(), "is not a dense tensor"),
    (AMAX, torch.ones(1).expand(2**40), rf"{AMAX} repeats its numbers to the shape"),
    ("first.weight_quantizer.amin", torch.tensor(-1.0), "is not expected"),
    (FACTORS, "3", "is a str, not a tensor"),
    (FACTORS, None, "is a NoneType, not a tensor"),
    (FACTORS, torch.ones(3, 1, 1).to_sparse(), "is not a dense tensor"),
    (FACTORS, torch.ones(3, 1, 1) * 1j, "has the type torch.complex64"),
    (FACTORS, torch.ones(1).expand(2**40), "repeats its numbers"),
]
BAD_RANGES: list[tuple[str, Any, str]] = [
    (AMAX, torch.ones(7), r"amax has shape \(7,\); expected one value"),
    (
        WEIGHT_AMAX,
        torch.ones(3, 1, 1, 1),
        rf"{WEIGHT_AMAX}: amax has shape \(3, 1, 1, 1\)",
    ),
    (
        AMAX,
        torch.ones(0, 3),
        r"amax of dtype torch.float32 and shape \(0, 3\); expected finite",
    ),
    *(
        (
            AMAX,
            torch.tensor(value, dtype=torch.float64),
            f"{AMAX}: range: got amax .*; expected finite numbers >= 0",
        )
        for value in (float("nan"), float("inf"), -1.0, 1e39)
    ),
    *(
        (
            FACTORS,
            torch.tensor(value),
            f"{FACTORS}: got zero, negative, NaN or infinite values",
        )
        for value in (0.0, -1.0, float("nan"))
    ),
    (FACTORS, torch.ones(5), r"got shape \(5,\); expected .* \(3, 1, 1\)"),
    (FACTORS, torch.ones(3), r"got shape \(3,\)"),
    (FACTORS, torch.ones(2, 3, 1, 1), r"got shape \(2, 3, 1, 1\)"),
    (FACTORS, torch.ones(0), r"got shape \(0,\)"),
]
BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("torchq", [1], ConfigError, "record: got"),
    ("torchq/fusions", [FUSION], FuseError, "x"),
    ("state_dict", GONE, ConfigError, "got no 'state_dict'"),
    ("state_dict", [], ConfigError, "got no 'state_dict'"),
    *(
        (f"torchq/{path}", value, ConfigError, text)
        for path, value, text in BAD_RECORDS
    ),
    *(
        (f"torchq/{path}", value, QuantizationError, text)
        for path, value, text in RECORDS_OF_ANOTHER_MODEL
    ),
    *(
        (f"state_dict/{path}", value, QuantizationError, text)
        for path, value, text in TENSORS_OF_ANOTHER_MODEL
    ),
    *(
        (f"state_dict/{path}", value, ConfigError, text)
        for path, value, text in BAD_RANGES
    ),
]


@pytest.mark.sample(40)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize(("path", "value", "error", "text"), BAD)
def test_bad_files_are_refused_and_change_nothing(
    path: str,
    value: Any,
    error: type[Exception],
    text: str,
    data: dict[str, Any],
    tmp_path: Path,
) -> None:
    bad = copy.deepcopy(data)
    change(bad, path, value)
    refused(bad, tmp_path / "bad.pt", error, text)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("first", QuantizationError, "has an attribute"),
        ("forward", QuantizationError, "an attribute"),
        ("class", ConfigError, "identifiers"),
        (
            'z", None) or print("owned") or getattr(self, "0',
            ConfigError,
            "Python identifiers",
        ),
    ],
)
def test_children_of_impossible_names_are_refused(
    name: str, error: type[Exception], text: str, data: dict[str, Any], tmp_path: Path
) -> None:
    bad = copy.deepcopy(data)
    rename_child(bad, name)
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


def test_bytes_changed_at_random_give_named_errors(
    data: dict[str, Any], tmp_path: Path
) -> None:
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


def test_a_changed_bit_of_the_numbers_is_found(
    data: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(data, tmp_path / "good.pt")
    good = (tmp_path / "good.pt").read_bytes()
    source = random.Random(0)
    expected = {key: value.clone() for key, value in data["state_dict"].items()}
    for key in ("first.weight", "second.bias", AMAX):
        place = good.index(data["state_dict"][key].flatten()[:1].numpy().tobytes())
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
        assert all(
            torch.equal(found[key], value) for key, value in data["state_dict"].items()
        )


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    torchq.save(quantized(), tmp_path / "good.pt")
    with (
        zipfile.ZipFile(tmp_path / "good.pt") as good,
        zipfile.ZipFile(tmp_path / "bad.pt", "w", zipfile.ZIP_DEFLATED) as bad,
    ):
        for part in good.infolist():
            zeros = (
                bytes(1 << 25) if part.filename.endswith("data/0") else good.read(part)
            )
            bad.writestr(part.filename, zeros)
    with pytest.raises(
        ConfigError, match=r"\d+ bytes unpack to \d+, but torch.save does not"
    ):
        torchq.load(Net(), tmp_path / "bad.pt")


def test_factors_of_the_input_are_those_of_the_file(tmp_path: Path) -> None:
    """Also if the model has others, or some where the file has none."""
    model = quantized()
    torchq.save(model, tmp_path / "plain.pt")
    scaled = quantized()
    scaled.first.input_quantizer.pre_quant_scale = torch.tensor([1.0, 2.0, 0.5]).view(
        3, 1, 1
    )
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
    original = nn.Conv2d._load_from_state_dict
    calls = []

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
    model = simulated(
        nn.Sequential(nn.Linear(4, 4)), [torch.rand(8, 4)], torchq.recipes.integer(4, 4)
    )
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


def partly() -> Net:
    """A model with a float layer."""
    return simulated(Net().eval(), [X], exclude=["second"])


CONFIGS: dict[str, Callable[[], Net]] = {
    "float": lambda: Net().eval(),
    "int8": lambda: quantized(target=None),
    "partly": partly,
    "w4a4": lambda: quantized(torchq.recipes.w4a4(), target=None),
    "tensorrt": lambda: quantized(target="tensorrt"),
    "openvino": quantized,
    "asymmetric": lambda: quantized(torchq.recipes.int8(symmetric=False), target=None),
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("into", CONFIGS)
@pytest.mark.parametrize("saved", [name for name in CONFIGS if name != "float"])
def test_loading_converts_whatever_the_model_was(
    saved: str, into: str, tmp_path: Path
) -> None:
    """A W4A4 file makes an INT8 model W4A4; a float layer of the file is float afterwards."""
    model = CONFIGS[saved]()
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(CONFIGS[into](), tmp_path / "m.pt")
    assert torchq.swap.plan_of(loaded) == torchq.swap.plan_of(model)
    assert torch.equal(loaded(X), model(X))


def test_a_quantizer_of_the_author_must_be_the_same(tmp_path: Path) -> None:
    def build(bits: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, 2), torchq.TensorQuantizer(QuantDescriptor(bits))
        )

    model = build(8)
    torchq.quantize_(model)
    torchq.save(model, tmp_path / "m.pt")
    with pytest.raises(
        QuantizationError, match=r"1: quantizes as int4 .*; expected int8"
    ):
        torchq.load(build(4), tmp_path / "m.pt")


def test_a_failed_save_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    class Unsaveable(nn.Linear):
        def get_extra_state(self) -> Any:
            return lambda: None  # cannot be pickled

        def set_extra_state(self, state: Any) -> None:
            pass

    path = tmp_path / "m.pt"
    torchq.save(quantized(), path)
    before = path.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        torchq.save(nn.Sequential(Unsaveable(2, 2)), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt"]


def test_a_factory_of_no_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"factory returned a int; expected a torch\.nn\.Module"
    ):
        torchq.load_model(lambda: 3, tmp_path / "m.pt")  # type: ignore[arg-type, return-value]


def test_a_model_without_numbers_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    torchq.quantize_(model)
    torchq.save(model, tmp_path / "m.pt")
    empty = nn.Sequential(nn.Linear(3, 2, device="meta"))
    text = r"0\.bias and 5 more: on the meta device.*to_empty"
    with pytest.raises(QuantizationError, match=text):
        torchq.load(empty, tmp_path / "m.pt")
    assert type(empty[0]) is nn.Linear
    torchq.load(empty.to_empty(device="cpu"), tmp_path / "m.pt")
    assert torch.equal(empty[0].weight, model[0].weight)
