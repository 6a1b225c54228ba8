"""The kernels against the definition, the choice between them, and what they allocate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.functional.kernel_cases import (
    CASES,
    FORMATS,
    Case,
    assert_equals_definition,
    bits,
    make,
)
from torchq.errors import ConfigError
from torchq.formats import CATALOG, INT8, Granularity, PerAxis, PerBlock, PerTensor
from torchq.functional import fake_quantize, learned_fake_quantize, reduce_amax
from torchq.functional.kernels import backend_for, reference, tiled, use_backend
from torchq.functional.kernels import dispatch as choice


@pytest.fixture(
    params=[2**18, 7],
    ids=["one-tile", "tiny-tiles"],
)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with so few elements in a tile that every case needs many."""
    monkeypatch.setattr(tiled, "_TILE", request.param)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_equal_the_definition(case: Case, dtype: torch.dtype) -> None:
    for name in (*FORMATS, "e8m0"):
        x, amax = make(case, dtype)
        assert_equals_definition("tiled", x, amax, name)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize(
    ("format_name", "scales"), [("e4m3", "e8m0"), ("e2m1", "e4m3")]
)
def test_tiles_with_rounded_scales(format_name: str, scales: str) -> None:
    x, amax = make(Case("blocks", (6, 3, 32), (6, 3, 1)), torch.float32)
    assert_equals_definition("tiled", x, amax.clamp(max=5.0), format_name, scales)


def test_a_range_that_the_low_dtype_cannot_hold(low_dtype: torch.dtype) -> None:
    """|x| <= amax is decided in float32.

    1.0 does not pass a range just below it, though that range rounds to 1.0.
    """
    for backend in ("reference", "tiled"):
        x = torch.ones(2, dtype=low_dtype, requires_grad=True)
        with use_backend(backend):
            fake_quantize(x, torch.tensor(1.0 - 2.0**-14)).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [0.0, 0.0]


def test_gradients_of_other_strides_and_second_derivatives() -> None:
    """An expanded gradient, a transposed one, a batch of them, and a gradient of the gradient."""
    x = torch.randn(4, 6).mul(2).requires_grad_()
    mask = (x.detach().abs() <= 1.0).float()
    assert torch.equal(torch.autograd.grad(fake_quantize(x, 1.0).sum(), x)[0], mask)
    weight = torch.randn(6, 4).t()
    assert torch.equal(
        torch.autograd.grad((fake_quantize(x, 1.0) * weight).sum(), x)[0], mask * weight
    )
    batch = torch.randn(3, 4, 6)
    (grads,) = torch.autograd.grad(
        fake_quantize(x, 1.0), x, batch, is_grads_batched=True
    )
    assert torch.equal(grads, mask * batch)
    w = torch.randn(4, 6, requires_grad=True)
    (first,) = torch.autograd.grad(
        (fake_quantize(x, 1.0) * w).sum(), x, create_graph=True
    )
    assert torch.equal(torch.autograd.grad(first.sum(), w)[0], mask)


def saved(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """What autograd keeps of a call, besides its arguments."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        function(x)
    return [
        t
        for t in kept
        if t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    ]


GRANULARITIES = [PerTensor(), PerAxis((0,)), PerAxis((1,)), PerBlock(8)]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_backward_keeps_one_byte_per_element(
    backend: str, dtype: torch.dtype, granularity: Granularity
) -> None:
    x = torch.randn(64, 32).to(dtype).requires_grad_()
    amax = reduce_amax(x, granularity)
    with use_backend(backend):
        kept = saved(lambda v: fake_quantize(v, amax, INT8, granularity), x)
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.int8, x.numel())]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_learned_range_keeps_its_arguments_alone(
    backend: str, granularity: Granularity
) -> None:
    x = torch.randn(64, 32, requires_grad=True)
    amax = reduce_amax(x, granularity).requires_grad_()
    with use_backend(backend):
        kept = saved(lambda v: learned_fake_quantize(v, amax, INT8, granularity), x)
    assert [t.untyped_storage().data_ptr() for t in kept] == [
        amax.untyped_storage().data_ptr()
    ]


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_learned_gradients_of_tiles_equal_the_definition(
    case: Case, dtype: torch.dtype
) -> None:
    for name in ("int4", "uint8", "e4m3"):
        x, amax = make(case, dtype)
        grad = torch.randn(x.shape).to(dtype)
        expected, _ = reference.learned_gradients(grad, x, amax, CATALOG[name], None)
        got, _ = tiled.learned_gradients(grad, x, amax, CATALOG[name], None)
        assert got.dtype is dtype
        assert got.stride() == torch.empty_like(x).stride()
        assert torch.equal(
            bits(got + 0.0),
            bits(expected + 0.0),
        )
        x, amax = x.nan_to_num(1.0, 2.0, -2.0).clamp(-9, 9), amax.nan_to_num(posinf=3.0)
        _, expected = reference.learned_gradients(grad, x, amax, CATALOG[name], None)
        _, got = tiled.learned_gradients(grad, x, amax, CATALOG[name], None)
        # At most 252 terms below 300 (the largest grid value that clips times a gradient, over
        # qmax) in another order.
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an operator returned first."""

    def __init__(self) -> None:
        super().__init__()
        # Kept alive, so that an address means one storage.
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                self.storages.setdefault(
                    t.untyped_storage().data_ptr(), t.untyped_storage()
                )
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_temporary_as_large_as_the_input(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Result, mask and gradient; besides them only tiles."""
    monkeypatch.setattr(tiled, "_TILE", 256)
    x = torch.randn(64, 256).to(dtype).requires_grad_()
    grad = torch.ones_like(x)
    with Allocations() as seen:
        fake_quantize(x, 1.0).backward(grad)
    known = {x.untyped_storage().data_ptr(), grad.untyped_storage().data_ptr()}
    sizes = sorted(
        s.nbytes() for address, s in seen.storages.items() if address not in known
    )
    large = [size for size in sizes if size > 256 * 4]
    assert large == [
        x.numel(),
        x.numel() * dtype.itemsize,
        x.numel() * dtype.itemsize,
    ]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:FutureWarning")
# Torch 2.9.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_choice() -> None:
    x = torch.ones(3)
    assert backend_for(x) == backend_for(x.requires_grad_()) == "tiled"
    assert backend_for(torch.ones(3, device="meta")) == "reference"
    seen = []
    torch.vmap(lambda v: (seen.append(backend_for(v)), v)[1])(torch.ones(2, 3))

    def run(v: Tensor) -> Tensor:
        seen.append(backend_for(v))
        return fake_quantize(v, 1.0)

    with use_backend("tiled"):
        torch.jit.trace(run, torch.ones(3), check_trace=False)
        exported = torch.export.export(
            _Module(run),
            (torch.ones(3),),
        )
    assert set(seen) == {"reference"}
    assert all("torchq" not in str(node.target) for node in exported.graph.nodes)


class _Module(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_forcing_nests_and_ends_after_an_error() -> None:
    x = torch.ones(3)
    seen = []

    def fail() -> None:
        with use_backend("tiled"):
            seen.append(backend_for(x))
            raise ZeroDivisionError

    with use_backend("reference"):
        with pytest.raises(ZeroDivisionError):
            fail()
        seen.append(backend_for(x))
    assert [*seen, backend_for(x)] == ["tiled", "reference", "tiled"]


def test_wrong_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "use_backend: got 'cuda'; expected one of reference, tiled, triton"
    with pytest.raises(ConfigError, match=expected), use_backend("cuda"):
        pass
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    expected = r"'triton', which is not installed; expected .* Run pip install triton"
    with pytest.raises(ConfigError, match=expected), use_backend("triton"):
        pass


def test_forced_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "supports", lambda x, amax, format, affine: False)
    expected = r"backend 'tiled' cannot do int8 for torch.float32 on cpu .*; expected"
    with use_backend("tiled"), pytest.raises(ConfigError, match=expected):
        fake_quantize(torch.ones(3), 1.0)
    assert backend_for(torch.ones(3)) == "reference"
