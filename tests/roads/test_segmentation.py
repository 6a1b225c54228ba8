"""segmentation_models_pytorch: a U-Net is trained with its own loss, and measured by its IoU."""

from pathlib import Path
from typing import Any

import pytest
import torch

import torchq
from tests.roads.end import ROAD, arrives

pytestmark = ROAD


def test_training_and_export(tmp_path: Path) -> None:
    smp = pytest.importorskip(
        "segmentation_models_pytorch", reason="the road is its own"
    )
    torch.manual_seed(0)
    images = torch.rand(4, 3, 64, 64)
    masks = (images.mean(1, keepdim=True) > 0.5).float()

    def build() -> Any:
        channels = (32, 16, 16, 8, 8)
        return smp.Unet(
            "resnet18", encoder_weights=None, classes=1, decoder_channels=channels
        )

    model = build()
    prepared = torchq.qat.prepare(
        model, images.split(2), target="onnxruntime", progress=False
    )
    optimizer = torch.optim.SGD(prepared.param_groups, momentum=0.9)
    dice = smp.losses.DiceLoss("binary")

    def step(trained: Any, optimizer: torch.optim.Optimizer) -> None:
        dice(trained.train()(images), masks).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model, optimizer)
    torchq.save(model, tmp_path / "last.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    # Another process goes on: the same model, and its optimizer with the momentum.
    resumed = torchq.load(build(), tmp_path / "last.pt")
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = dict(resumed.named_parameters())
    groups = [
        {**group, "params": [parameters[names[id(p)]] for p in group["params"]]}
        for group in prepared.param_groups
    ]
    other = torch.optim.SGD(groups, momentum=0.9)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    step(model, optimizer)
    step(resumed, other)
    with torch.no_grad():
        assert torch.equal(resumed.eval()(images), model.eval()(images))
    model = resumed
    folds = torchq.fuse_(model.eval(), images[:2], progress=False)
    assert folds.applied and not folds.refused, folds

    def iou(run: Any) -> float:
        counts = smp.metrics.get_stats(run(images) > 0, masks.long(), mode="binary")
        return float(smp.metrics.iou_score(*counts, reduction="micro"))

    arrives("smp", model, images[:2], tmp_path / "net.onnx", iou, within=0.02)
