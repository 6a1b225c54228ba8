"""Quantized models in Lightning's checkpoints and Hugging Face's folders."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import simulated
from torchq.errors import ConfigError
from torchq.workflow import embed_record_

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """The head has the weight of the first layer, as language models tie theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.first(x)).relu())


class Lit(nn.Module):
    """What LightningModule is to a checkpoint: the parent of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net()
        self.register_buffer("step", torch.zeros(()))


@pytest.fixture
def model() -> Net:
    net = simulated(Net().eval(), [X], torchq.recipes.w4a4())
    embed_record_(net)
    return net


def safetensors(state: dict[str, Tensor], path: Path) -> None:
    """Write the format by its description: a length, a JSON header, the bytes."""
    names = {
        "torch.float32": "F32",
        "torch.int8": "I8",
        "torch.uint8": "U8",
        "torch.int64": "I64",
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, tensor in state.items():
        content = tensor.detach().contiguous().numpy().tobytes()
        header[name] = {
            "dtype": names[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(content)],
        }
        body += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_a_folder_of_hugging_face_gives_the_quantized_model(
    model: Net, tmp_path: Path
) -> None:
    state = model.state_dict()
    del state["head.weight"]  # save_pretrained writes a tied tensor once
    safetensors(state, tmp_path / "model.safetensors")
    loaded = torchq.load(Net().eval(), tmp_path)
    assert torch.equal(loaded(X), model(X))
    assert loaded.head.weight is loaded.first.weight
    assert loaded.head.input_quantizer.name == "head.input_quantizer"
    assert torch.equal(
        torchq.load_model(Net, tmp_path / "model.safetensors").eval()(X), model(X)
    )


def test_a_folder_in_parts(model: Net, tmp_path: Path) -> None:
    state = list(model.state_dict().items())
    parts = {"a.bin": dict(state[:3]), "b.bin": dict(state[3:])}
    for name, part in parts.items():
        torch.save(part, tmp_path / name)
    where = {key: name for name, part in parts.items() for key in part}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert torch.equal(torchq.load(Net().eval(), tmp_path)(X), model(X))
    index.write_text("{}")
    with pytest.raises(ConfigError, match="is no index of weights"):
        torchq.load(Net(), tmp_path)


def test_a_checkpoint_of_lightning(model: Net, tmp_path: Path) -> None:
    lit = Lit().eval()
    lit.model = model
    torch.save({"state_dict": lit.state_dict(), "epoch": 3}, tmp_path / "x.ckpt")
    whole = torchq.load(Lit().eval(), tmp_path / "x.ckpt")
    inner = torchq.load(Net().eval(), tmp_path / "x.ckpt")
    assert torch.equal(whole.model(X), model(X))
    assert torch.equal(inner(X), model(X))
    assert whole.model.first.input_quantizer.name == "model.first.input_quantizer"


def test_the_model_itself_loads_its_state_dicts(model: Net) -> None:
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "torchq_record" in twin.state_dict()
        twin.load_state_dict(state)


def test_a_model_without_a_record_is_named(tmp_path: Path) -> None:
    torch.save({"state_dict": Net().state_dict()}, tmp_path / "x.ckpt")
    with pytest.raises(
        ConfigError, match=r"or the one of torchq\.workflow\.embed_record_"
    ):
        torchq.load(Net(), tmp_path / "x.ckpt")
    with pytest.raises(
        ConfigError, match=r"got no weights; expected model\.safetensors"
    ):
        torchq.load(Net(), tmp_path)


@pytest.mark.parametrize(
    "value", [torch.tensor([1, 2]), torch.tensor([255]), torch.ones(2), "x"]
)
def test_damaged_records_are_named(value: Any, tmp_path: Path) -> None:
    torch.save({"torchq_record": value}, tmp_path / "x.bin")
    with pytest.raises(ConfigError):
        torchq.load(Net(), tmp_path / "x.bin")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:4],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:-8],
        lambda data: data.replace(b"F32", b"F99"),
        lambda data: data.replace(b"[4, 4]", b"[4, 9]"),
    ],
)
def test_damaged_safetensors_are_named(change: Any, model: Net, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors(model.state_dict(), path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigError, match="cannot be read"):
        torchq.load(Net(), path)


@pytest.mark.parametrize("name", [".", "..", "a\0b", "missing.safetensors", ""])
def test_an_index_that_names_no_file_is_damaged(name: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ConfigError, match=r"is no index of weights|expected files in"):
        torchq.load(nn.Linear(2, 2), tmp_path)
