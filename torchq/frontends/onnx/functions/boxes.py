"""What lies inside the boxes of detectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchq.frontends.building.written import write_operator


def roi_align(
    x: Tensor,
    rois: Tensor,
    batches: Tensor,
    size: tuple[int, int],
    ratio: int,
    scale: float,
    half_pixel: bool,
    largest: bool,
) -> Tensor:
    """Return regions of feature maps resampled to one size (Mask R-CNN, He et al. 2017, 3).

    Args:
        x: (N, C, H, W).
        rois: (regions, 4) as x1, y1, x2, y2.
        batches: the image of each region.
        size: height and width of the results.
        ratio: samples along each side of a bin; 0 for as many as fit.
        scale: from coordinates of regions to those of ``x``.
        half_pixel: pixels lie at half coordinates.
        largest: take the largest of the weighted samples instead of the mean.
    """
    if torch.onnx.is_in_onnx_export():
        options = {
            "output_height": size[0],
            "output_width": size[1],
            "sampling_ratio": ratio,
            "spatial_scale": float(scale),
            "mode": "max" if largest else "avg",
            "coordinate_transformation_mode": "half_pixel" if half_pixel else "output_half_pixel",
        }
        shape = (rois.shape[0], x.shape[1], *size)
        example = x.new_zeros(shape) if torch.jit.is_tracing() else None
        return write_operator("RoiAlign", 16, [x, rois, batches], options, shape, x.dtype, example)
    results = [
        _align_one(
            x[int(b)], roi * scale - (0.5 if half_pixel else 0.0), size, ratio, half_pixel, largest
        )
        for roi, b in zip(rois, batches, strict=True)
    ]
    return torch.stack(results) if results else x.new_zeros(0, x.shape[1], *size)


def _align_one(
    image: Tensor, roi: Tensor, size: tuple[int, int], ratio: int, half_pixel: bool, largest: bool
) -> Tensor:
    x1, y1, x2, y2 = roi.tolist()
    width, height = x2 - x1, y2 - y1
    if not half_pixel:
        width, height = max(width, 1.0), max(height, 1.0)
    (rows, row_weights, ny) = _samples(y1, height, size[0], ratio, image.shape[1])
    (columns, column_weights, nx) = _samples(x1, width, size[1], ratio, image.shape[2])
    corners = [
        [
            image[:, rows[i]][:, :, columns[j]]
            * (row_weights[i][:, None] * column_weights[j]).to(image)
            for j in (0, 1)
        ]
        for i in (0, 1)
    ]
    shape = (image.shape[0], size[0], ny, size[1], nx)
    if largest:
        stacked = torch.stack([part for pair in corners for part in pair]).amax(0)
        return stacked.view(shape).amax((2, 4))
    return (corners[0][0] + corners[0][1] + corners[1][0] + corners[1][1]).view(shape).mean((2, 4))


def _samples(
    start: float, length: float, bins: int, ratio: int, size: int
) -> tuple[list[Tensor], list[Tensor], int]:
    """Return two neighbours and their weights for every sample, and the samples in a bin."""
    count = ratio if ratio > 0 else max(1, math.ceil(length / bins))
    at = start + (torch.arange(bins * count, dtype=torch.float64) + 0.5) * (length / bins / count)
    outside = (at < -1.0) | (at > size)
    at = at.clamp(min=0)
    low = at.floor().long()
    last = low >= size - 1
    low = torch.where(last, size - 1, low)
    high = torch.where(last, size - 1, low + 1)
    fraction = torch.where(last, 0.0, at - low)
    alive = (~outside).double()
    return [low, high], [(1 - fraction) * alive, fraction * alive], count
