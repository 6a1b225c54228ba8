"""timm: its optimizer, scheduler and EMA train for ONNX Runtime, and the EMA becomes the file.

As its train script does, with branches that are dropped; its checkpoint is loaded into the network
without them, as its scripts for validation and export build it.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchq
from tests.roads.end import ROAD, arrives

pytestmark = ROAD


def test_training_and_export(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="the road is timm's")
    from timm.models import load_checkpoint
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, ModelEmaV3

    torch.manual_seed(0)
    images = torch.rand(16, 3, 32, 32)
    labels = torch.arange(16) % 4
    batches = list(zip(images.split(8), labels.split(8), strict=True))
    model = timm.create_model("resnet10t", num_classes=4, drop_path_rate=0.1)
    prepared = torchq.qat.prepare(model, batches, target="onnxruntime", progress=False)
    optimizer = create_optimizer_v2(
        prepared.param_groups, opt="sgd", lr=1e-2, momentum=0.9
    )
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2)
    ema = ModelEmaV3(model, decay=0.5)
    folder = str(tmp_path)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=folder)
    for epoch in range(2):
        for x, y in batches:
            F.cross_entropy(model.train()(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
        scheduler.step(epoch)
        saver.save_checkpoint(epoch, metric=float(epoch))
    loaded = timm.create_model("resnet10t", num_classes=4).eval()
    torchq.qat.prepare(loaded, batches, target="onnxruntime", progress=False)
    load_checkpoint(loaded, f"{folder}/model_best.pth.tar", use_ema=True)
    with torch.no_grad():
        assert torch.equal(loaded(images), ema.module.eval()(images))
    folds = torchq.fuse_(loaded, images[:2], progress=False)
    assert folds.applied and not folds.refused, folds

    def loss(run: object) -> float:
        outputs: Tensor = run(images)  # type: ignore[operator]
        return float(F.cross_entropy(outputs, labels))

    arrives("timm", loaded, images[:2], tmp_path / "net.onnx", loss, within=0.02)
