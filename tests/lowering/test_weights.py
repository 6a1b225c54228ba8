"""Models whose plain weights are dropped stay whole: states, files, copies, moves and programs."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import Residual, calibrated, stored_state
from tests.processes import call
from torchq.lowering.kernel import available
from torchq.lowering.layer import DeployedLayer
from torchq.runtimes import Torch

pytestmark = pytest.mark.skipif(
    not available(), reason="needs torch's oneDNN operators"
)


def layers(model: nn.Module) -> list[DeployedLayer]:
    return [m for m in model.modules() if isinstance(m, DeployedLayer)]


def dropped(fuse: bool = True) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a deployed network that has run, the same that has not, and an input."""
    x = torch.randn(2, 3, 16, 16)
    whole = torchq.deploy(
        calibrated(Residual().eval(), x),
        target=Torch(fuse=fuse),
    )
    model = copy.deepcopy(whole)
    model(x), model(x.abs())
    assert not plain(model)
    assert len(plain(whole)) == len(layers(whole)) == 6
    return model, whole, x


def plain(model: nn.Module) -> list[Tensor]:
    """Return the plain weights that a model keeps in memory."""
    return [m.kernel.plain for m in layers(model) if m.kernel.plain is not None]


@pytest.mark.parametrize("fuse", [True, False])
def test_results_of_any_size_are_the_same(fuse: bool) -> None:
    model, whole, x = dropped(fuse)
    for data in (x, x.abs(), x[..., :10, :12], x[:1]):
        assert torch.equal(model(data), whole(data))
    assert torch.equal(model.eval()(x), whole(x))
    assert not plain(model)


@pytest.mark.parametrize("name", ["weight_codes", "weight_scale", "bias"])
def test_a_tensor_of_a_layer_can_be_replaced(name: str) -> None:
    model, whole, x = dropped(fuse=False)
    before = model(x)
    for layer in (layers(model)[0], layers(whole)[0]):
        negative = -getattr(layer, name)
        setattr(layer, name, negative)
        assert torch.equal(layer.state_dict()[name], negative)
    assert torch.equal(model(x), whole(x))
    assert not torch.equal(model(x), before)


def test_state_dicts_files_and_copies_are_whole() -> None:
    model, whole, x = dropped()
    expected = whole(x)
    state = model.state_dict()
    assert list(state) == list(whole.state_dict())
    for name, value in whole.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(state[name], value), name
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    copies.append(torch.load(file, weights_only=False))
    assert all(torch.equal(other(x), expected) for other in copies)
    other, _, _ = dropped()
    second = torch.randn(2, 3, 16, 16)
    other.load_state_dict(stored_state(model))
    assert torch.equal(other(second), model(second))
    assert not plain(model)


def test_a_state_that_does_not_fit_is_an_error() -> None:
    model, whole, x = dropped()
    state = model.state_dict()
    name = next(name for name in state if name.endswith("weight_codes"))
    with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
        model.load_state_dict(
            {key: value for key, value in state.items() if key != name}
        )
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
        model.load_state_dict({**state, name: state[name][:1]})
    assert torch.equal(model(x), whole(x))


def test_weights_that_are_unpacked_in_inference_mode_are_ordinary_tensors() -> None:
    (model, _, x), (other, _, _) = dropped(), dropped()
    with torch.inference_mode():
        model(x)
        assert not any(layer.weight_codes.is_inference() for layer in layers(model))
    model.load_state_dict(stored_state(other))
    assert torch.equal(model(x), other(x))


def test_a_model_that_has_run_can_be_converted() -> None:
    model, whole, x = dropped()
    model.to(torch.bfloat16), whole.to(torch.bfloat16)
    assert torch.equal(
        model(x.bfloat16()),
        whole(x.bfloat16()),
    )
    assert {layer.weight_scale.dtype for layer in layers(model)} == {torch.float32}


MAPS = Path("/proc/self/maps")


def file_at(address: int) -> str:
    """Which file is mapped to an address of this process; empty for its own memory."""
    for line in MAPS.read_text(encoding="utf-8").splitlines():
        span, *rest = line.split(maxsplit=5)
        low, high = (int(bound, 16) for bound in span.split("-"))
        if low <= address < high:
            return rest[4] if len(rest) == 5 else ""
    return ""


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc")
def test_weights_of_a_mapped_file_stay_there_until_they_are_packed(
    tmp_path: Path,
) -> None:
    model, _, x = dropped()
    path = tmp_path / "model"
    torch.save(model, path)
    mapped = torch.load(path, mmap=True, weights_only=False)
    assert {file_at(weight.data_ptr()) for weight in plain(mapped)} == {str(path)}
    for size in (16, 8, 16):
        assert torch.equal(
            mapped(x[..., :size, :size]),
            model(x[..., :size, :size]),
        )
    assert torch.equal(
        copy.deepcopy(mapped)(x),
        model(x),
    )
    assert not plain(mapped)


def compare(model: nn.Module, x: Tensor, expected: Tensor) -> None:
    """Run in another process, which ends with an error where the results differ."""
    assert torch.equal(model(x), expected)


@pytest.mark.slow
def test_a_spawned_process_gets_a_deployed_model_that_has_run() -> None:
    x = torch.randn(1, 3, 8, 8)
    model = torchq.deploy(
        calibrated(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x), x
    )
    arguments = (model, x, model(x))
    call(compare, *arguments)
