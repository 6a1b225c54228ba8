"""Train a quantized network with Lightning, and load its checkpoint.

python examples/lightning_training.py --epochs 2
"""

from __future__ import annotations

import argparse
import tempfile

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchq


class Reader(lightning.LightningModule):
    """A network for digits that is quantized from the start."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
        self.network = nn.Sequential(*convolutions, *head)
        example = torch.zeros(1, 1, 8, 8)
        torchq.quantize_(self.network, target="onnxruntime", example=example)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            torchq.qat.param_groups(self, lr=3e-3, weight_decay=1e-3)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    model = Reader()
    torchq.calibrate(model.network, images[:256].split(64), progress=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=options.epochs,
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader)
        path = trainer.checkpoint_callback.best_model_path
        loaded = Reader.load_from_checkpoint(path).eval()
    with torch.no_grad():
        same = torch.equal(loaded.network(images), model.eval().network(images))
        correct = (loaded.network(images).argmax(1) == labels).float().mean()
    print(
        f"trained: {correct:.0%}; the checkpoint is {'equal' if same else 'different'}"
    )


if __name__ == "__main__":
    main()
