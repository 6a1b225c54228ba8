"""Compiled code gives the numbers of eager code, by Inductor: other backends generate none.

Inductor's first compilation takes 20 s. The default run has what it compiles, which the backend
``aot_eager_decomp_partition`` runs: the same graphs forwards and backwards, split in the same way.
"""

import pytest
import torch

from torchq import formats
from torchq.formats import Format, Granularity, PerAxis, PerBlock, PerTensor
from torchq.functional import fake_quantize, reduce_amax

pytestmark = [  # What torch 2.9 says about itself.
    pytest.mark.filterwarnings(
        "ignore:.*Function'> should not be instantiated:DeprecationWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:Skipping serialization of skipfiles_inline:UserWarning"
    ),
]


@pytest.mark.parametrize(
    "backend",
    ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("shape", "granularity", "format", "scale_format"),
    [
        ((6, 100), PerBlock(32), formats.INT4, None),
        ((6, 100), PerBlock(32), formats.E4M3, formats.E8M0),
        ((2, 100, 5), PerBlock(16, 1), formats.E2M1, formats.E4M3),
        ((70, 8), PerBlock(32, 0), formats.INT8, None),
        ((3, 4, 5, 5), PerAxis((1,)), formats.INT8, None),
        ((3, 40), PerTensor(), formats.UINT8, None),
    ],
    ids=str,
)
def test_fake_quantize(
    shape: tuple[int, ...],
    granularity: Granularity,
    format: Format,
    scale_format: Format | None,
    backend: str,
) -> None:
    """Also where blocks do not divide the axis, and backwards."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return fake_quantize(
            x, reduce_amax(x, granularity), format, granularity, scale_format
        )

    torch._dynamo.reset()
    torch.manual_seed(0)
    x, y = (
        t.requires_grad_()
        for t in torch.randn(shape).repeat(2, *[1] * len(shape)).unbind()
    )
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    kept: list[torch.dtype] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.dtype) or t, lambda t: t
    )
    expected = run(x)
    # In this process: Inductor reads the variable of the environment once, when it is imported.
    options = {"compile_threads": 1} if backend == "inductor" else None
    with hooks:
        got = torch.compile(run, fullgraph=True, backend=backend, options=options)(y)
    assert kept == [torch.int8]  # One byte, and no boolean, which is slow.
    assert got.stride() == expected.stride()
    assert torch.equal(got, expected)
    weights = torch.randn(shape)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(y.grad, x.grad)
