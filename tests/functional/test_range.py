"""Ranges of tensors: their ends, several of them together, and where code is traced."""

import pytest
import torch
from torch import Tensor, nn

from torchq.formats import UINT8
from torchq.functional import Range


def test_a_range_with_two_ends_holds_zero() -> None:
    x = torch.tensor([[0.5, 2.0], [-3.0, -1.0]])
    whole = Range.of(x, symmetric=False)
    assert (whole.low, whole.high) == (-3.0, 2.0)
    for one_sided, ends in ((x[0], (0.0, 2.0)), (x[1], (-3.0, 0.0))):
        one = Range.of(one_sided, symmetric=False)
        assert (one.low, one.high) == ends
    assert Range.of(x[1]) == Range(torch.tensor(3.0))


def test_ranges_of_one_kind_are_joined() -> None:
    a = torch.tensor([-1.0, 3.0])
    b = torch.tensor([-2.0, 1.0])
    both = Range.of(a, symmetric=False).joined(Range.of(b, symmetric=False))
    assert (both.low, both.high) == (-2.0, 3.0)
    magnitudes = Range.of(a).joined(Range.of(b))
    assert magnitudes.low is None
    assert magnitudes.high == 3.0


class Ranges(nn.Module):
    """Returns the ranges of its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return Range.of(x).high, Range.of(x, symmetric=False).low


def test_ranges_are_one_step_of_a_traced_graph() -> None:
    """What they look at, such as the device, is no value of the trace."""
    traced = torch.fx.symbolic_trace(Ranges())
    functions = [
        node.target.__name__
        for node in traced.graph.nodes
        if node.op == "call_function"
    ]
    assert {"reduce_amax", "_both_ends"} < set(functions)
    x = torch.tensor([0.5, -4.0])
    assert traced(x) == Ranges()(x) == (4.0, -4.0)


def test_pixels_of_both_signs_lie_at_no_ties() -> None:
    """In [-1, 1] 0 is halfway between two of 256 levels, and each would be at a tie."""
    pixels = torch.arange(256.0) / 127.5 - 1
    plain = Range.of(pixels, symmetric=False)
    at_ties = (pixels / plain.qparams(UINT8).scale) % 1
    torch.testing.assert_close(at_ties, torch.full((256,), 0.5), atol=1e-3, rtol=0)
    qparams = plain.qparams(UINT8)
    assert len(qparams.codes(pixels / qparams.scale).unique()) < 250
    moved = plain.off_ties(UINT8)
    qparams = moved.qparams(UINT8)
    steps = pixels / qparams.scale
    assert float(((steps % 1) - 0.5).abs().min()) > 1e-3
    assert len(qparams.codes(steps).unique()) > 245
    errors = qparams.codes(steps) - qparams.zero_point - steps
    # It would be a quarter of a step towards 0 if the steps were no longer.
    assert abs(float((errors * pixels.sign()).mean())) < 0.05
    torch.testing.assert_close(moved.low, torch.tensor(-33 / 32 * 128 / 127))
    torch.testing.assert_close(moved.high, torch.tensor(33 / 32))


@pytest.mark.parametrize(
    "ends", [(-1.0, 2.0), (0.0, 1.0), (-3.0, 0.0), (0.0, 0.0)], ids=str
)
def test_other_ranges_stay(ends: tuple[float, float]) -> None:
    found = Range(torch.tensor(ends[1]), torch.tensor(ends[0]))
    assert found.off_ties(UINT8) == found
    symmetric = Range(torch.tensor(1.0))
    assert symmetric.off_ties(UINT8) is symmetric
