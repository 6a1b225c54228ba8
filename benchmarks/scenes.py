"""Scenes that are composed on the spot, and a small detector that is trained on them in minutes.

An image has one to three discs, squares and triangles of any colour on a noisy gradient. The
detector is what mobile ones are: depthwise convolutions, SiLU, Hardswish, and a head that gives
(N, 4 + classes, cells) with centre, size and a score for each class.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.utils import progress_bar

SIDE, CELLS, KINDS = 64, 8, 3
_STRIDE = SIDE // CELLS
_BATCH, _SCENES = 32, 6000


def _grid(cells: int, stride: int) -> tuple[Tensor, Tensor]:
    """Return the rows and the columns of the centres of cells."""
    place = (torch.arange(cells) + 0.5) * stride
    return torch.meshgrid(place, place, indexing="ij")


def scene(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return an image (3, 64, 64), the corners of its objects (n, 4) and their kinds (n,)."""
    y, x = _grid(SIDE, 1)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    slope = (uniform(3, 2) - 0.5) / SIDE
    image = uniform(3, 1, 1) + slope[:, :1, None] * x + slope[:, 1:, None] * y
    image = image + 0.05 * torch.randn(3, SIDE, SIDE, generator=generator)
    middle = image.mean((1, 2), keepdim=True)
    boxes = []
    kinds = []
    for _ in range(int(torch.randint(1, 4, (), generator=generator))):
        half = 5 + 8 * float(uniform(1))
        cx, cy = (half + (SIDE - 2 * half) * uniform(2)).tolist()
        kind = int(torch.randint(KINDS, (), generator=generator))
        dx = (x - cx).abs()
        dy = (y - cy).abs()
        inside = (
            dx.square() + dy.square() < half**2,
            torch.maximum(dx, dy) < half,
            (y - cy < half) & (2 * dx < y - cy + half),
        )[kind]
        colour = (middle + 0.3 + 0.4 * uniform(3, 1, 1)) % 1  # never that of the ground
        image = torch.where(inside, colour + 0.05 * uniform(3, SIDE, SIDE), image)
        boxes.append([cx - half, cy - half, cx + half, cy + half])
        kinds.append(kind)
    return 2 * image - 1, torch.tensor(boxes), torch.tensor(kinds)


def images(count: int, seed: int) -> Tensor:
    """Return scenes alone, (count, 3, 64, 64)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([scene(generator)[0] for _ in range(count)])


def _block(
    inputs: int, outputs: int, stride: int, act: type[nn.Module]
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs),
        act(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
        act(),
    )


class Detector(nn.Module):
    """Maps images (N, 3, 64, 64) to (N, 4 + 3, 64): centre and size in pixels, and scores."""

    def __init__(self) -> None:
        super().__init__()
        stem = (
            nn.Conv2d(3, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16, eps=1e-3),
            nn.Hardswish(),
        )
        self.down = nn.Sequential(
            *stem, _block(16, 32, 2, nn.Hardswish), _block(32, 64, 2, nn.SiLU)
        )
        self.deep = nn.Sequential(
            _block(64, 64, 1, nn.SiLU), _block(64, 64, 1, nn.SiLU)
        )
        self.boxes = nn.Sequential(_block(64, 64, 1, nn.SiLU), nn.Conv2d(64, 4, 1))
        self.kinds = nn.Sequential(_block(64, 64, 1, nn.SiLU), nn.Conv2d(64, KINDS, 1))
        nn.init.constant_(self.kinds[-1].bias, -3.0)
        rows, columns = _grid(CELLS, _STRIDE)
        self.register_buffer("centres", torch.stack([columns, rows]).flatten(1))

    def raw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return centres and sizes (N, 4, cells), and the logits of the kinds."""
        x = self.down(x)
        x = x + self.deep(x)
        boxes = self.boxes(x).flatten(2)
        kinds = self.kinds(x).flatten(2)
        middle = self.centres + _STRIDE * boxes[:, :2]
        return torch.cat([middle, 4 * _STRIDE * boxes[:, 2:].sigmoid()], 1), kinds

    def forward(self, x: Tensor) -> Tensor:
        """Return the head of YOLO that torchq.analysis.Detections reads."""
        boxes, kinds = self.raw(x)
        return torch.cat([boxes, kinds.sigmoid()], 1)


def _targets(boxes: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the box and the one-hot kind of each cell whose centre is near that of an object."""
    rows, columns = (grid.flatten() for grid in _grid(CELLS, _STRIDE))
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    size = boxes[:, 2:] - boxes[:, :2]
    target_boxes = torch.zeros(4, CELLS**2)
    kind = torch.zeros(KINDS, CELLS**2)
    for i in range(len(boxes)):  # later objects cover earlier ones, as in the image
        near = ((columns - middle[i, 0]).abs() < _STRIDE) & (
            (rows - middle[i, 1]).abs() < _STRIDE
        )
        target_boxes[:, near] = torch.cat([middle[i], size[i]])[:, None]
        kind[:, near] = F.one_hot(kinds[i], KINDS).float()[:, None]
    return target_boxes, kind


def _scenes(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, and what each cell should return."""
    generator = torch.Generator().manual_seed(seed)
    rows = [scene(generator) for _ in range(count)]
    target_boxes, kinds = zip(
        *(_targets(boxes, kinds) for _, boxes, kinds in rows), strict=True
    )
    return (
        torch.stack([image for image, _, _ in rows]),
        torch.stack(target_boxes),
        torch.stack(kinds),
    )


def fit_detector(model: Detector, steps: int, seed: int = 0) -> None:
    """Train in place, and end in eval mode."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=steps + 1
    )
    rows = _scenes(min(_SCENES, steps * _BATCH), seed)
    for _ in progress_bar(range(steps), description="train", unit="step"):
        index = torch.randint(len(rows[0]), (_BATCH,))
        x, target_boxes, kinds = (tensor[index] for tensor in rows)
        boxes, logits = model.raw(x)
        near = kinds.amax(1, keepdim=True)
        of_boxes = (
            F.smooth_l1_loss(boxes, target_boxes, reduction="none") * near
        ).sum() / near.sum()
        odds = F.binary_cross_entropy_with_logits(logits, kinds, reduction="none")
        focus = (logits.sigmoid() - kinds).abs().square()
        loss = of_boxes / _STRIDE + (focus * odds).sum() / near.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
