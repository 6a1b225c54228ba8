"""Fake quantization under torch.compile, torch.vmap, torch.func and torch.fx, and on the device.

There is no graph break and no wait for the device, and the numbers are the same.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.contracts.quantize_contract import same
from torchq import formats
from torchq.formats import CATALOG, Granularity, PerAxis, PerBlock, PerTensor
from torchq.functional import fake_quantize, learned_fake_quantize, reduce_amax

CASES: list[tuple[str, Granularity, str | None]] = [
    ("int8", PerTensor(), None),
    ("int4", PerAxis((0,)), None),
    ("e4m3", PerTensor(), None),
    ("int4", PerBlock(4), None),
    ("e4m3", PerBlock(4), "e8m0"),
    ("e2m1", PerBlock(4), "e4m3"),
]
VMAP_OF_FLOATS = pytest.mark.skipif(
    torch.__version__.startswith("2.9"),
    reason="torch 2.9 has no vmap rule for view(dtype)",
)


# torch 2.9: dynamo makes an object of every autograd.Function that it meets, and torch warns of it
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function'> should not be instantiated:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Each test compiles for itself.

    Dynamo counts recompilations of one function over all of them.
    """
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name", ["int8", "uint4", pytest.param("e4m3", marks=VMAP_OF_FLOATS)]
)
def test_vmap(name: str) -> None:
    """Mapped over data and ranges, over ranges alone, over data alone; and the gradient mapped."""
    x = torch.randn(4, 5)
    amax = torch.rand(4) + 0.5
    format = CATALOG[name]
    rows = fake_quantize(
        x,
        amax[:, None],
        format,
        PerAxis((0,)),
    )
    assert same(torch.vmap(lambda v, a: fake_quantize(v, a, format))(x, amax), rows)
    assert same(
        torch.vmap(lambda a: fake_quantize(x[0], a, format))(amax)[2],
        fake_quantize(x[0], amax[2], format),
    )
    assert same(
        torch.vmap(lambda v: fake_quantize(v, 1.0, format))(x),
        fake_quantize(x, 1.0, format),
    )
    grads = torch.vmap(torch.func.grad(lambda v, a: fake_quantize(v, a, format).sum()))(
        x, amax
    )
    assert same(grads, (x.abs() <= amax[:, None]).float())


def test_gradient_of_a_learned_range_by_torch_func() -> None:
    x = torch.randn(6)
    amax = torch.tensor(1.0)
    leaf = amax.clone().requires_grad_()
    learned_fake_quantize(x, leaf).sum().backward()
    assert leaf.grad is not None
    assert same(
        torch.func.grad(lambda a: learned_fake_quantize(x, a).sum())(amax), leaf.grad
    )
    per_sample = torch.vmap(
        torch.func.grad(lambda a, v: learned_fake_quantize(v, a).sum()),
        in_dims=(None, 0),
    )(amax, x)
    torch.testing.assert_close(per_sample.sum(), leaf.grad)


@pytest.mark.parametrize(("name", "granularity", "scales"), CASES, ids=str)
def test_meta_and_fake_tensors(
    name: str, granularity: Granularity, scales: str | None
) -> None:
    x = torch.empty(3, 10, device="meta", dtype=torch.bfloat16)
    scale_format = None if scales is None else CATALOG[scales]
    y = fake_quantize(
        x, reduce_amax(x, granularity), CATALOG[name], granularity, scale_format
    )
    assert y.is_meta
    assert y.shape == x.shape
    assert y.dtype is x.dtype


def test_on_the_device(device: torch.device, generator: torch.Generator) -> None:
    """The same bits on every device."""
    x = torch.randn(64, 37, generator=generator)
    for name, granularity, scales in CASES:
        scale_format = None if scales is None else CATALOG[scales]
        amax = reduce_amax(x, granularity) * 0.9
        expected = fake_quantize(x, amax, CATALOG[name], granularity, scale_format)
        moved = x.to(device), amax.to(device)
        y = fake_quantize(*moved, CATALOG[name], granularity, scale_format)
        assert same(y.cpu(), expected)
    assert fake_quantize(x.to(device), 1.0, formats.UINT8).device.type == device.type
