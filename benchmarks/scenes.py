"""Scenes that are composed on the spot, and a small detector that is trained on them in minutes.

An image has one to five discs, squares and triangles of any colour on a noisy gradient. The
detector is what mobile ones are: depthwise convolutions, SiLU, Hardswish, and a head that gives
(N, 4 + classes, cells) with centre, size and a score for each class.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE, CELLS, KINDS = 96, 12, 3
_STRIDE = SIDE // CELLS
_STEPS, _BATCH = 900, 32


def scene(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return an image (3, 96, 96), the corners of its objects (n, 4) and their kinds (n,)."""
    y, x = torch.meshgrid(torch.arange(SIDE) + 0.5, torch.arange(SIDE) + 0.5, indexing="ij")

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    slope = (uniform(3, 2) - 0.5) / SIDE
    image = uniform(3, 1, 1) + slope[:, :1, None] * x + slope[:, 1:, None] * y
    image = image + 0.08 * torch.randn(3, SIDE, SIDE, generator=generator)
    boxes, kinds = [], []
    for _ in range(int(torch.randint(1, 6, (), generator=generator))):
        half = 6 + 12 * float(uniform(1))
        cx, cy = (half + (SIDE - 2 * half) * uniform(2)).tolist()
        kind = int(torch.randint(KINDS, (), generator=generator))
        dx, dy = (x - cx).abs(), (y - cy).abs()
        inside = (
            dx.square() + dy.square() < half**2,
            torch.maximum(dx, dy) < half,
            (y - cy < half) & (2 * dx < y - cy + half),
        )[kind]
        image = torch.where(inside, uniform(3, 1, 1) + 0.05 * uniform(3, SIDE, SIDE), image)
        boxes.append([cx - half, cy - half, cx + half, cy + half])
        kinds.append(kind)
    return 2 * image - 1, torch.tensor(boxes), torch.tensor(kinds)


def images(count: int, seed: int) -> Tensor:
    """Return scenes alone, (count, 3, 96, 96)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([scene(generator)[0] for _ in range(count)])


def _block(inputs: int, outputs: int, stride: int, act: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        act(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        act(),
    )


class Detector(nn.Module):
    """Maps images (N, 3, 96, 96) to (N, 4 + 3, 144): centre and size in pixels, and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.Hardswish()
        )
        self.down = nn.Sequential(
            _block(24, 48, 2, nn.Hardswish),
            _block(48, 96, 2, nn.SiLU),
        )
        self.deep = nn.Sequential(_block(96, 96, 1, nn.SiLU), _block(96, 96, 1, nn.SiLU))
        self.boxes = nn.Sequential(_block(96, 64, 1, nn.SiLU), nn.Conv2d(64, 4, 1))
        self.kinds = nn.Sequential(_block(96, 64, 1, nn.SiLU), nn.Conv2d(64, KINDS, 1))
        nn.init.constant_(self.kinds[-1].bias, -3.0)
        place = (torch.arange(CELLS) + 0.5) * _STRIDE
        rows, columns = torch.meshgrid(place, place, indexing="ij")
        self.register_buffer("centres", torch.stack([columns, rows]).flatten(1))

    def raw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return centres and sizes (N, 4, cells), and the logits of the kinds."""
        x = self.down(self.stem(x))
        x = x + self.deep(x)
        boxes, kinds = self.boxes(x).flatten(2), self.kinds(x).flatten(2)
        middle = self.centres + _STRIDE * boxes[:, :2]
        return torch.cat([middle, 4 * _STRIDE * boxes[:, 2:].sigmoid()], 1), kinds

    def forward(self, x: Tensor) -> Tensor:
        """Return the head of YOLO that torchq.analysis.Detections reads."""
        boxes, kinds = self.raw(x)
        return torch.cat([boxes, kinds.sigmoid()], 1)


def _targets(boxes: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the box and the one-hot kind of each cell whose centre is near that of an object."""
    place = (torch.arange(CELLS) + 0.5) * _STRIDE
    rows, columns = (grid.flatten() for grid in torch.meshgrid(place, place, indexing="ij"))
    middle, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    wanted, kind = torch.zeros(4, CELLS**2), torch.zeros(KINDS, CELLS**2)
    for i in range(len(boxes)):  # later objects cover earlier ones, as in the image
        near = ((columns - middle[i, 0]).abs() < _STRIDE) & ((rows - middle[i, 1]).abs() < _STRIDE)
        wanted[:, near] = torch.cat([middle[i], size[i]])[:, None]
        kind[:, near] = F.one_hot(kinds[i], KINDS).float()[:, None]
    return wanted, kind


def _batches(steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = [scene(generator) for _ in range(_BATCH)]
        wanted, kinds = zip(*(_targets(boxes, kinds) for _, boxes, kinds in rows), strict=True)
        yield torch.stack([image for image, _, _ in rows]), torch.stack(wanted), torch.stack(kinds)


def trained_detector(steps: int = _STEPS, seed: int = 0) -> nn.Module:
    """Train a detector, and return it in eval mode."""
    torch.manual_seed(seed)
    model = Detector().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1)
    for x, wanted, kinds in _batches(steps, seed):
        boxes, logits = model.raw(x)
        near = kinds.amax(1, keepdim=True)
        of_boxes = (F.smooth_l1_loss(boxes, wanted, reduction="none") * near).sum() / near.sum()
        odds = F.binary_cross_entropy_with_logits(logits, kinds, reduction="none")
        focus = (logits.sigmoid() - kinds).abs().square()
        loss = of_boxes / _STRIDE + (focus * odds).sum() / near.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()
