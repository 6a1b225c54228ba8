"""The algebra against torch's own layers run one after the other, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.fusion import algebra as al

# Sums of at most a few hundred products of unit normals in float64: 1e-12 leaves a factor of
# about 100 over the rounding error.
TOL = 1e-12

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(a: Any, b: Any) -> Any:
    return torch.allclose(a, b, rtol=0, atol=TOL * max(1.0, b.abs().max().item()))


def channelwise(x: Tensor, scale: float, shift: Any) -> Any:
    view = (1, -1, *[1] * (x.dim() - 2))
    return x * scale.view(view) + shift.view(view)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("has_bias", [True, False])
def test_fold_after_conv(rank: int, groups: int, has_bias: bool) -> None:
    x = randn(2, 6, *[5] * rank)
    kernel = randn(12, 6 // groups, *[3] * rank)
    bias = randn(12) if has_bias else None
    scale = randn(12)
    shift = randn(12)
    want = channelwise(
        CONV[rank](x, kernel, bias, padding=1, groups=groups), scale, shift
    )
    got = al.fold_affine_after(kernel, bias, scale, shift)
    assert close(CONV[rank](x, *got, padding=1, groups=groups), want)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    ("groups", "per_group"),
    [(1, 3), (2, 1), (2, 3), (4, 2)],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_fold_after_transposed_conv(
    rank: int, groups: int, per_group: int, has_bias: bool
) -> None:
    out = groups * per_group
    x = randn(2, 8, *[4] * rank)
    kernel = randn(8, per_group, *[3] * rank)
    bias = randn(out) if has_bias else None
    scale = randn(out)
    shift = randn(out)
    want = channelwise(
        TRANSPOSED[rank](x, kernel, bias, stride=2, padding=1, groups=groups),
        scale,
        shift,
    )
    got = al.fold_affine_after(
        kernel, bias, scale, shift, groups=groups, transposed=True
    )
    assert close(TRANSPOSED[rank](x, *got, stride=2, padding=1, groups=groups), want)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_identity_kernel_for_any_groups(groups: int) -> None:
    x = randn(2, 8, 5, 5)
    assert torch.equal(
        F.conv2d(x, al.identity_kernel(8, groups, (3, 3)), padding=1, groups=groups), x
    )


@pytest.mark.parametrize(
    ("window", "padding"),
    [
        ((1, 1), (0, 0)),
        ((1, 3), (0, 1)),
        ((3, 1), (1, 0)),
        ((3, 3), (1, 1)),
        ((3, 3), (2, 2)),
    ],
)
def test_pad_kernel_aligns_any_padding(window: Any, padding: Any) -> None:
    x = randn(1, 2, 9, 9)
    kernel = randn(3, 2, *window)
    before = [2 - p for p in padding]
    after = [5 - b - k for b, k in zip(before, window, strict=True)]
    want = F.conv2d(x, kernel, padding=padding)
    wide = F.conv2d(x, al.pad_kernel(kernel, before, after), padding=2)
    # Where the padding makes the outputs of different size, the wide kernel still computes the
    # common ones, from the same corner.
    assert close(
        wide[..., : want.shape[2], : want.shape[3]],
        want[..., : wide.shape[2], : wide.shape[3]],
    )


@pytest.mark.parametrize("new_groups", [1, 2, 3, 6, 12])
def test_regroup_kernel(new_groups: int) -> None:
    x = randn(1, 24, 5, 5)
    kernel = randn(36, 2, 3, 3)
    assert close(
        F.conv2d(x, al.regroup_kernel(kernel, 12, new_groups), groups=new_groups),
        F.conv2d(x, kernel, groups=12),
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("one", "two", "stride"), [(1, 3, 1), (1, 1, 1), (3, 1, 2), (3, 3, 1), (3, 2, 2)]
)
def test_compose(groups: int, one: Any, two: Any, stride: int) -> None:
    x = randn(2, 4, 11, 11)
    first = al.KernelBias(
        randn(8, 4 // groups, one, one),
        randn(8),
    )
    second = al.KernelBias(
        randn(12, 8 // groups, two, two),
        randn(12),
    )
    want = F.conv2d(
        F.conv2d(x, *first, stride=stride, groups=groups), *second, groups=groups
    )
    got = al.compose(first, second, groups=groups, stride=(stride, stride))
    assert close(F.conv2d(x, *got, stride=stride, groups=groups), want)
