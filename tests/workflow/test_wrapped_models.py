"""Files of models in wrappers: what torch.compile, DataParallel and the like return."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import torchq
from tests.models import simulated
from tests.rank_processes import needs_gloo
from torchq.utils import unwrapped
from torchq.workflow import embed_record_

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    ).eval()


def quantized() -> nn.Module:
    return simulated(net(), [X])


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: model,
    "compile": compiled,
    "DataParallel": nn.DataParallel,
    "AveragedModel": AveragedModel,
    "checkpoint_wrapper": checkpoint_wrapper,
    "compiled DataParallel": lambda model: compiled(nn.DataParallel(model)),
}


def as_trainers_do(model: nn.Module, path: Path) -> None:
    embed_record_(unwrapped(model))
    torch.save(model.state_dict(), path)


@pytest.mark.sample(8)
@pytest.mark.parametrize("into", WRAPPERS)
@pytest.mark.parametrize("saved", WRAPPERS)
@pytest.mark.parametrize("write", [torchq.save, as_trainers_do])
def test_files_do_not_depend_on_wrappers(
    write: Callable[[nn.Module, Path], None], saved: str, into: str, tmp_path: Path
) -> None:
    model = quantized()
    write(WRAPPERS[saved](model), tmp_path / "m.bin")
    target = WRAPPERS[into](net())
    assert torchq.load(target, tmp_path / "m.bin") is target
    assert torch.equal(target(X), model(X))


class Two(nn.Module):
    """A network whose trunk is a child, and a layer that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk: Any = net()
        self.act: Any = nn.ReLU()
        self.also = self.act

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.also(self.act(self.trunk(x)))
        return found


@pytest.mark.sample(12)
@pytest.mark.parametrize("into", WRAPPERS)
@pytest.mark.parametrize("saved", WRAPPERS)
def test_children_may_be_wrapped(saved: str, into: str, tmp_path: Path) -> None:
    model = Two().eval()
    target = Two().eval()
    simulated(model, [X])
    expected = model(X)
    model.trunk = wrapper = WRAPPERS[saved](model.trunk)
    torchq.save(model, tmp_path / "m.pt")
    assert model.trunk is wrapper
    target.trunk = wrapper = WRAPPERS[into](target.trunk)
    torchq.load(target, tmp_path / "m.pt")
    assert target.trunk is wrapper
    assert torch.equal(target(X), expected)


def test_a_failed_load_leaves_the_wrappers(tmp_path: Path) -> None:
    torchq.save(quantized(), tmp_path / "m.pt")
    target = Two().eval()
    target.trunk = wrapper = compiled(target.trunk)
    with pytest.raises(torchq.errors.QuantizationError):
        torchq.load(target, tmp_path / "m.pt")
    assert target.trunk is wrapper


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@needs_gloo
@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_is_unwrapped(tmp_path: Path) -> None:
    model = quantized()
    torchq.save(DistributedDataParallel(model), tmp_path / "m.pt")
    assert torch.equal(torchq.load(net(), tmp_path / "m.pt")(X), model(X))
    target = DistributedDataParallel(net())
    torchq.load(target, tmp_path / "m.pt")
    assert torch.equal(target(X), model(X))


def test_a_deployed_model_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    model = torchq.deploy(quantized())
    text = r"save: .*: got a \w+ of a deployed model.*call torch\.save\(model, path\)"
    with pytest.raises(torchq.errors.QuantizationError, match=text):
        torchq.save(model, tmp_path / "m.pt")
    assert not any(tmp_path.iterdir())


def test_an_exported_model_is_refused() -> None:
    model = torch.export.export(quantized(), (X,)).module()
    text = r"save: 0\.\w+_quantizer: got a \w+; expected a quantizer\. Save the model"
    with pytest.raises(torchq.errors.QuantizationError, match=text):
        torchq.save(model, "/dev/null")
