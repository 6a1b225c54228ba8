"""Quantized models in the real save and load of Hugging Face, Lightning and accelerate."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import simulated
from torchq.workflow import embed_record_

# The libraries warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")


class Branches(nn.Module):
    """Two layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 8)
        self.right = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.left(x) * self.right(x).sigmoid())
        return out


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def quantized(model: nn.Module, x: Any, target: str | None = "onnxruntime") -> Any:
    simulated(model, [x], target=target, example=x)
    embed_record_(model)
    return model


@pytest.mark.parametrize("learned", [False, True])
def test_a_quantizer_in_several_places_has_a_tensor_for_each(learned: bool) -> None:
    """Libraries that write safetensors refuse names of one tensor, or leave all but one out."""
    model: Any = simulated(Branches().eval(), [X], target="onnxruntime", example=X)
    if learned:
        torchq.qat.learn_ranges_(model)
    quantizer = model.left.input_quantizer
    assert quantizer is model.right.input_quantizer
    state = model.state_dict()
    places = [
        tensor.untyped_storage().data_ptr()
        for tensor in state.values()
        if tensor.numel()
    ]
    assert len(set(places)) == len(places)
    assert state["left.input_quantizer.amax"].data_ptr() == quantizer.amax.data_ptr()
    assert torch.equal(state["right.input_quantizer.amax"], quantizer.amax)
    assert copy.deepcopy(model).load_state_dict(state) == ([], [])


@pytest.mark.parametrize("target", [None, "onnxruntime"])
def test_folders_of_hugging_face(target: str | None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AlbertConfig(
        **sizes, intermediate_size=32, vocab_size=50, embedding_size=8
    )
    words = {"input_ids": torch.arange(16).view(2, 8)}
    network = transformers.AlbertForSequenceClassification
    model = quantized(network(config).eval(), words, target)
    model.save_pretrained(tmp_path)
    loaded = torchq.load(network.from_pretrained(tmp_path).eval(), tmp_path)
    assert torch.equal(loaded(**words).logits, model(**words).logits)


def test_checkpoints_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Branches()

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            return self(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    model = quantized(Lit().eval(), X)
    path = tmp_path / "x.ckpt"
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), 4)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet
    )
    trainer.fit(model.train(), data)
    trainer.save_checkpoint(path)
    expected = model.eval()(X)
    assert torch.equal(torchq.load(Lit(), path).eval()(X), expected)
    again = Lit.load_from_checkpoint(path, strict=False)
    assert torch.equal(torchq.load(again, path).eval()(X), expected)
    trainer.fit(model.train(), data, ckpt_path=path)


def test_states_of_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(quantized(Branches().eval(), X))
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "weights")
    expected = model(X)
    model.left.input_quantizer.set_range(-0.1, 0.1)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model(X), expected)
    assert torch.equal(
        torchq.load(Branches().eval(), tmp_path / "weights")(X), expected
    )
