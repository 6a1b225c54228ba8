"""The cases in which every kernel must equal the definition, and the comparison, bit for bit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.formats import CATALOG
from torchq.functional import compute_dtype
from torchq.functional.kernels import kernels

FORMATS = (
    "int8",
    "int8_narrow",
    "uint8",
    "int4",
    "int16",
    "e4m3",
    "e5m2",
    "e2m1",
    "e3m2",
)
_NUMBERS = (
    "0 -0 inf -inf nan 1e-45 -1e-40 3e38 -3e38 0.5 -0.5 1.5 2.5 127.5 -128.5 448 464"
)
SPECIAL = [float(number) for number in _NUMBERS.split()]


@dataclass(frozen=True)
class Case:
    """Shape of a tensor (a block axis split), of its amax, and how the tensor lies in memory."""

    name: str
    shape: tuple[int, ...]
    amax_shape: tuple[int, ...]
    layout: str = "contiguous"

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("tensor", (3, 7, 5), ()),
    Case("tensor-channels-last", (2, 6, 3, 5), (), "channels_last"),
    Case("tensor-slice", (3, 7, 5), (), "slice"),
    Case("tensor-transposed", (4, 9), (), "transposed"),
    Case("tensor-expanded", (4, 9), (), "expanded"),
    Case("number", (), ()),
    Case("empty", (0, 3), (1, 3)),
    Case("axis0", (6, 4, 3, 3), (6, 1, 1, 1)),
    Case("axis0-channels-last", (6, 4, 3, 3), (6, 1, 1, 1), "channels_last"),
    Case("axis1", (3, 5, 2, 7), (1, 5, 1, 1)),
    Case("axis1-channels-last", (3, 5, 2, 7), (1, 5, 1, 1), "channels_last"),
    Case("axis1-slice", (3, 5, 7), (1, 5, 1), "slice"),
    Case("last-axis", (11, 6), (1, 6)),
    Case("axes01", (3, 5, 2, 7), (3, 5, 1, 1)),
    Case("axes02", (3, 5, 2, 7), (3, 1, 2, 1)),
    Case("block-last", (5, 3, 8), (5, 3, 1)),
    Case("block-first", (3, 8, 5), (3, 1, 5)),
    Case("block-middle", (2, 3, 4, 5), (2, 3, 1, 5)),
    Case("every-element", (4, 5), (4, 5)),
    Case("size-one", (1, 1, 9), (1, 1, 1)),
]


def make(
    case: Case, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return data with special values among it, and ranges.

    About a third of the data clips, one range is dead, one is infinite.
    """
    x = torch.randn(case.shape) * 2
    flat = x.view(-1)
    n = min(len(SPECIAL), flat.numel())
    where = torch.randperm(flat.numel())[:n]
    flat[where] = torch.tensor(SPECIAL)[torch.randperm(len(SPECIAL))[:n]]
    x = x.to(dtype)
    if case.layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif case.layout == "slice":
        x = torch.stack([x, -x], -1)[..., 0]
    elif case.layout == "transposed":
        x = x.t().contiguous().t()
    elif case.layout == "expanded":
        x = x[:1].expand(case.shape)
    amax = torch.rand(case.amax_shape, dtype=compute_dtype(dtype)) * 2 + 0.5
    if amax.numel() > 3:
        amax.view(-1)[1] = 1e-38
        amax.view(-1)[2] = torch.inf
        amax.view(-1)[3] = 1e-30
    return x.to(device), amax.to(device)


def bits(x: Tensor) -> Tensor:
    """The bits of floats, so that zeros of either sign differ; one NaN stands for all of them."""
    kinds = {
        torch.float16: torch.int16,
        torch.bfloat16: torch.int16,
        torch.float32: torch.int32,
        torch.float64: torch.int64,
    }
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x).view(kinds[x.dtype])


def assert_equals_definition(
    backend: str, x: Tensor, amax: Tensor, format_name: str, scales: str | None = None
) -> None:
    """Check forward, mask and backward of ``backend``.

    They have the values, dtype, shape and strides of the definition.
    """
    format = CATALOG[format_name]
    scale_format = None if scales is None else CATALOG[scales]
    expected, expected_mask = kernels("reference").fake_quantize(
        x, amax, format, scale_format, True
    )
    without, none = kernels(backend).fake_quantize(x, amax, format, scale_format, False)
    y, mask = kernels(backend).fake_quantize(x, amax, format, scale_format, True)
    assert none is None
    assert mask is not None
    assert expected_mask is not None
    for got in (y, without):
        assert got.dtype is x.dtype
        assert got.stride() == torch.empty_like(x).stride()
        # Which zero the clamp of a negative zero gives is left open by torch.
        if not format.signed:
            got, expected = got + 0.0, expected + 0.0
        assert torch.equal(bits(got), bits(expected))
    assert mask.dtype is torch.int8
    assert torch.equal(mask, expected_mask)
    grad = torch.randn(x.shape).to(x)
    grad.view(-1)[:3] = torch.tensor([torch.inf, -0.0, torch.nan][: grad.numel()]).to(
        grad
    )
    grad = torch.empty_like(mask, dtype=x.dtype).copy_(grad)
    got = kernels(backend).mask_gradient(grad, mask)
    assert got.stride() == grad.stride()
    assert torch.equal(
        bits(got),
        bits(kernels("reference").mask_gradient(grad, mask)),
    )
