"""Loading makes a model what was saved, whatever it was before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.workflow.test_damaged_files import Net, X, quantized
from torchq import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError


def partly() -> Net:
    """A model with a float layer."""
    model = Net().eval()
    torchq.quantize_(model, exclude=["second"])
    torchq.calibrate(model, [X], progress=False)
    return model


CONFIGS: dict[str, Callable[[], Net]] = {
    "float": lambda: Net().eval(),
    "int8": lambda: quantized(target=None),
    "partly": partly,
    "w4a4": lambda: quantized(torchq.recipes.w4a4(), target=None),
    "tensorrt": lambda: quantized(target="tensorrt"),
    "openvino": quantized,
    "asymmetric": lambda: quantized(torchq.recipes.int8(symmetric=False), target=None),
}


@pytest.mark.parametrize("into", CONFIGS)
@pytest.mark.parametrize("saved", [name for name in CONFIGS if name != "float"])
def test_loading_converts_whatever_the_model_was(saved: str, into: str, tmp_path: Path) -> None:
    """A W4A4 file makes an INT8 model W4A4; a float layer of the file is float afterwards."""
    model = CONFIGS[saved]()
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(CONFIGS[into](), tmp_path / "m.pt")
    assert torchq.swap.plan_of(loaded) == torchq.swap.plan_of(model)
    assert torch.equal(loaded(X), model(X))


def test_a_quantizer_of_the_author_must_be_the_same(tmp_path: Path) -> None:
    def build(bits: int) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), torchq.TensorQuantizer(QuantDescriptor(bits)))

    model = build(8)
    torchq.quantize_(model)
    torchq.save(model, tmp_path / "m.pt")
    with pytest.raises(QuantizationError, match=r"1: quantizes as int4 .*; expected int8"):
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
    with pytest.raises(ConfigError, match=r"factory returned a int; expected a torch\.nn\.Module"):
        torchq.load_model(lambda: 3, tmp_path / "m.pt")  # type: ignore[arg-type, return-value]


def test_a_model_without_numbers_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    torchq.quantize_(model)
    torchq.save(model, tmp_path / "m.pt")
    empty = nn.Sequential(nn.Linear(3, 2, device="meta"))
    with pytest.raises(
        QuantizationError, match=r"0\.bias and 5 more: on the meta device.*to_empty"
    ):
        torchq.load(empty, tmp_path / "m.pt")
    assert type(empty[0]) is nn.Linear
    torchq.load(empty.to_empty(device="cpu"), tmp_path / "m.pt")
    assert torch.equal(empty[0].weight, model[0].weight)
