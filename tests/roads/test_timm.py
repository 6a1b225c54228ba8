"""timm: its optimizer, scheduler and EMA train for ONNX Runtime, and the EMA becomes the file."""

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
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3

    torch.manual_seed(0)
    images = torch.rand(16, 3, 32, 32)
    labels = torch.arange(16) % 4
    batches = list(zip(images.split(8), labels.split(8), strict=True))
    model = timm.create_model("resnet10t", pretrained=False, num_classes=4)
    prepared = torchq.qat.prepare(model, batches, target="onnxruntime", progress=False)
    optimizer = create_optimizer_v2(
        prepared.param_groups, opt="sgd", lr=1e-2, momentum=0.9
    )
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2)
    ema = ModelEmaV3(model, decay=0.5)
    for epoch in range(2):
        for x, y in batches:
            F.cross_entropy(model.train()(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
        scheduler.step(epoch)
    trained = ema.module.eval()
    torchq.save(trained, tmp_path / "ema.pt")
    fresh = timm.create_model("resnet10t", pretrained=False, num_classes=4)
    loaded = torchq.load(fresh, tmp_path / "ema.pt").eval()
    folds = torchq.fuse_(loaded, images[:2], progress=False)
    assert folds.applied and not folds.refused, folds

    def loss(run: object) -> float:
        outputs: Tensor = run(images)  # type: ignore[operator]
        return float(F.cross_entropy(outputs, labels))

    arrives("timm", loaded, images[:2], tmp_path / "net.onnx", loss, within=0.02)
