"""The Triton kernels against the definition.

tests/functional/test_kernels_triton.py runs this file: interpreted on the CPU, compiled on a GPU.
"""

import pytest
import torch

from tests.functional.kernel_cases import (
    CASES,
    FORMATS,
    Case,
    assert_equals_definition,
    make,
)
from torchq.errors import ConfigError
from torchq.formats import CATALOG, INT8, PerAxis, PerBlock
from torchq.functional import fake_quantize
from torchq.functional.kernels import backend_for, kernels, use_backend
from torchq.functional.kernels import triton as kernel

DEVICE = "cpu" if kernel.INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Kept, shared, kept, shared: more than one division finds the range of an element.
TWO_DIVISIONS = "axes02"


ONE_DIVISION = [case for case in CASES if case.name != TWO_DIVISIONS]


@pytest.mark.sample(17)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ONE_DIVISION, ids=str)
def test_equals_definition(case: Case, dtype: torch.dtype) -> None:
    for name in FORMATS if dtype is torch.float32 else ("int8", "e4m3"):
        x, amax = make(case, dtype, DEVICE)
        assert kernels("triton").supports(x, amax, CATALOG[name])
        assert_equals_definition("triton", x, amax, name)


@pytest.mark.parametrize(
    ("format_name", "scales"), [("e4m3", "e8m0"), ("e2m1", "e4m3")]
)
def test_rounded_scales(format_name: str, scales: str) -> None:
    x, amax = make(Case("blocks", (6, 3, 32), (6, 3, 1)), torch.float32, DEVICE)
    assert_equals_definition("triton", x, amax.clamp(max=5.0), format_name, scales)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(1025,), (3, 2050), (2050, 3), (5, 17, 33)], ids=str)
def test_more_than_one_program(shape: tuple[int, ...]) -> None:
    ones = (1,) * (len(shape) - 1)
    for amax_shape in ((), (shape[0], *ones), (*ones, shape[-1])):
        x, amax = make(Case("large", shape, amax_shape), torch.float32, DEVICE)
        assert_equals_definition("triton", x, amax, "int8")
        assert_equals_definition("triton", x, amax, "e4m3")


def test_through_the_public_function() -> None:
    """Forward and gradient with the backend forced, per axis and in ragged blocks."""
    for granularity in (PerAxis((1,)), PerBlock(8)):
        x = torch.randn(5, 21, device=DEVICE)
        amax = torch.rand(granularity.amax_shape(x.shape), device=DEVICE) + 0.5
        results = []
        for backend in ("triton", "reference"):
            leaf = x.clone().requires_grad_()
            with use_backend(backend):
                y = fake_quantize(leaf, amax, INT8, granularity)
            (y * x).sum().backward()
            results.append((y.detach(), leaf.grad))
        assert torch.equal(
            results[0][0],
            results[1][0],
        )
        assert torch.equal(
            results[0][1],
            results[1][1],
        )  # type: ignore[arg-type]


def test_what_the_kernels_leave_to_the_definition() -> None:
    x, amax = make(
        next(c for c in CASES if c.name == TWO_DIVISIONS), torch.float32, DEVICE
    )
    for tensor, range_, format in (
        (x, amax, INT8),
        (x.double(), amax.double(), INT8),
        (x, amax[:1, :, :1], CATALOG["e8m0"]),
    ):
        assert not kernels("triton").supports(tensor, range_, format)
    expected = r"backend 'triton' cannot do int8 for torch.float32 .*use 'reference'"
    with use_backend("triton"), pytest.raises(ConfigError, match=expected):
        backend_for(x, amax)


def test_chosen_on_a_gpu() -> None:
    default = "tiled" if DEVICE == "cpu" else "reference"
    assert backend_for(torch.ones(3, device=DEVICE)) == default


@pytest.mark.skipif(
    DEVICE == "cpu", reason="a capture fails where the host waits for a GPU"
)
def test_captured_in_a_cuda_graph() -> None:
    x = torch.randn(64, 33, device="cuda", requires_grad=True)
    amax = torch.tensor(1.5, device="cuda")
    fake_quantize(x, amax).sum().backward()  # compiles the kernels, outside the capture
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        y = fake_quantize(x, amax)
        (grad,) = torch.autograd.grad(y.sum(), x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, fake_quantize(x, amax))
    assert torch.equal(grad, (x.abs() <= amax).float())
