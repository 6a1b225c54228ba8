"""Lightning: its Trainer trains for OpenVINO, from its own checkpoint to a file."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchq
from tests.models import ConvNet
from tests.roads.end import ROAD, arrives

pytestmark = ROAD
lightning = pytest.importorskip("lightning", reason="the road is Lightning's")


class Classifier(lightning.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        self.network = ConvNet()

    def training_step(self, batch: Any, _: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(torchq.qat.param_groups(self, lr=1e-2))


def test_training_and_export(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.randn(16, 3, 8, 8)
    labels = torch.arange(16) % 5
    data = DataLoader(TensorDataset(images, labels), batch_size=8)
    module = Classifier()
    torchq.qat.prepare(module.network, data, target="onnxruntime", progress=False)
    torchq.workflow.embed_record_(module.network)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **quiet
    )
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = torchq.load(Classifier(), tmp_path / "last.ckpt").eval()
    network: nn.Module = loaded.network
    with torch.no_grad():
        assert torch.equal(network(images), module.network.eval()(images))
    folds = torchq.fuse_(network, images[:2], progress=False)
    assert folds.applied and not folds.refused, folds

    def loss(run: Any) -> float:
        return float(F.cross_entropy(run(images), labels))

    arrives("Lightning", network, images[:2], tmp_path / "net.onnx", loss, within=0.02)
