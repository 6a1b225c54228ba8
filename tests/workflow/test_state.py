"""save and load: the same model in another process, and every mismatch named."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.models import ConvNet, simulated
from torchq import QuantConfig, QuantDescriptor, Rule, TensorQuantizer
from torchq.errors import ConfigError, ExportError, QuantizationError
from torchq.swap import plan_of
from torchq.workflow import quantizers

ROOT = Path(__file__).resolve().parents[2]


class Net(nn.Module):
    """A user's quantizer, a shared layer, a fused transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.again = self.a
        self.own = TensorQuantizer(QuantDescriptor(4))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.own(self.again(self.a(x)))))


CONFIG = QuantConfig(
    (
        Rule("*", input=QuantDescriptor(), weight=QuantDescriptor(axis=0)),
        Rule(
            "head",
            input=QuantDescriptor(4, learn_amax=True, scale_amax=0.9),
            weight=QuantDescriptor(4, block_size=4),
        ),
        Rule("layer.linear2", weight=QuantDescriptor((4, 3))),
    )
)


@pytest.fixture
def x(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 3, 8, generator=generator)


@pytest.fixture
def model(x: torch.Tensor) -> Net:
    net = simulated(Net().eval(), [x], CONFIG)
    net.a.input_quantizer.mode = "off"
    return net


def test_round_trip(model: Net, x: torch.Tensor, tmp_path: Path) -> None:
    torchq.save(model, tmp_path / "m.pt")
    torch.load(tmp_path / "m.pt", weights_only=True)
    for target in (Net(), Net().double().float(), copy.deepcopy(model)):
        loaded = torchq.load(target.eval(), tmp_path / "m.pt")
        assert loaded is target
        assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
        found, expected = quantizers(loaded), quantizers(model)
        assert {n: (q.descriptor, q.mode, q.name) for n, q in found.items()} == {
            n: (q.descriptor, q.mode, n) for n, q in expected.items()
        }
        with torch.no_grad():
            assert torch.equal(loaded(x), model(x))
    assert plan_of(target) == plan_of(model)


class Normed(nn.Module):
    """A block with branches and BatchNorm, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bn(self.conv(x)).relu().mean((2, 3)))


def fused_and_quantized(x: torch.Tensor) -> Normed:
    model = Normed().eval()
    nn.init.normal_(model.bn.running_mean)
    torchq.fuse_(model, x)
    return simulated(model, [x])


def quantized_unfused() -> Normed:
    model = Normed().eval()
    torchq.quantize_(model, torchq.recipes.w4a4())
    return model


@pytest.mark.parametrize("make", [lambda: Normed().eval(), quantized_unfused])
def test_an_unfused_model_becomes_the_fused_one_that_was_saved(
    make: Any, tmp_path: Path
) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = fused_and_quantized(x)
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(make(), tmp_path / "m.pt")
    assert isinstance(loaded.bn, nn.Identity)
    assert torch.equal(loaded(x), model(x))
    again = torchq.load(loaded, tmp_path / "m.pt")
    assert torch.equal(again(x), model(x))
    assert torch.equal(torchq.load_model(Normed, tmp_path / "m.pt").eval()(x), model(x))


def test_a_fused_model_cannot_become_an_unfused_one(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = quantized_unfused()
    torchq.save(model, tmp_path / "m.pt")
    target = fused_and_quantized(x)
    expected = target(x)
    with pytest.raises(QuantizationError, match="is fused; expected an unfused model"):
        torchq.load(target, tmp_path / "m.pt")
    assert torch.equal(target(x), expected)


def test_a_file_of_0_2_0_is_refused_with_a_way_to_convert_it() -> None:
    """The files are what that version wrote of a ConvNet in W4A4, and what this computed then."""
    files = Path(__file__).parent / "files"
    with pytest.raises(
        ConfigError, match=r"record of version 2; expected 3\. .*load_state_dict"
    ):
        torchq.load(ConvNet(), files / "0.2.0.pt")
    model = ConvNet().eval()
    torchq.quantize_(model, torchq.recipes.w4a4())
    data = torch.load(files / "0.2.0.pt", weights_only=True)
    model.load_state_dict(data["state_dict"])
    expected = torch.load(files / "0.2.0_results.pt", weights_only=True)
    images = torch.linspace(-2, 3, 2 * 3 * 8 * 8).sin().view(2, 3, 8, 8)
    # Sums of floats differ between processors by some units in the last place.
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="a device of Linux that is always full"
)
class Versioned(nn.Module):
    """A class that reads old files in another way, and refuses those without a version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)

    def _load_from_state_dict(
        self, state: Any, prefix: str, meta: Any, *rest: Any
    ) -> None:
        if meta.get("version") != self._version:
            raise ValueError(f"version should be 2 instead of {meta.get('version')}")
        super()._load_from_state_dict(state, prefix, meta, *rest)


def test_classes_that_ask_for_their_version_are_loaded(
    x: torch.Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "versioned.pt"
    model = simulated(Versioned().eval(), [x])
    torchq.save(model, path)
    loaded = torchq.load(Versioned().eval(), path)
    assert torch.equal(loaded(x), model(x))
    # The tensors of the file are a state dict, which torch loads too.
    tensors = torch.load(path, weights_only=True)["state_dict"]
    loaded.load_state_dict(tensors)


def test_a_full_disk_is_an_error_with_the_path(model: Net) -> None:
    with pytest.raises(
        ExportError, match=r"save: /dev/full: cannot be written \(.*\); expected "
    ):
        torchq.save(model, "/dev/full")


class Residual(nn.Module):
    """A module whose addition a target quantizes, so that its own class is in the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.layer(x))


def named(module: str, name: str = "Residual") -> type[nn.Module]:
    """Return the class as a program knows it that has it in ``module``."""
    names = {"__module__": module, "__qualname__": name}
    return type(name, (Residual,), names | {"forward": Residual.forward})


@pytest.mark.parametrize(
    ("saved", "loaded"), [("__main__", "train"), ("train", "__main__")]
)
def test_a_class_of_the_script_that_is_run_is_the_same_where_it_is_imported(
    saved: str, loaded: str, tmp_path: Path, generator: torch.Generator
) -> None:
    image = torch.randn(2, 3, 8, 8, generator=generator)
    model = named(saved)().eval()
    torchq.quantize_(model, target="onnxruntime", example=image, progress=False)
    torchq.calibrate(model, [image], progress=False)
    assert f"{saved}.Residual" in {
        entry.cls for entry in plan_of(model).operators.values()
    }
    torchq.save(model, tmp_path / "model.pt")
    other = torchq.load(named(loaded)().eval(), tmp_path / "model.pt")
    assert torch.equal(other(image), model(image))
    # What was loaded is saved and loaded again, under the name that its class has now.
    torchq.save(other, tmp_path / "again.pt")
    again = torchq.load(named(loaded)().eval(), tmp_path / "again.pt")
    assert torch.equal(again(image), model(image))
    with pytest.raises(
        QuantizationError, match=f"got {loaded}.Other; expected {saved}"
    ):
        torchq.load(named(loaded, "Other")().eval(), tmp_path / "model.pt")
