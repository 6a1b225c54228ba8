"""``symmetric=False``: a quantizer whose range has two ends, from calibration to checkpoints."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.reference import affine_fake_quantize, power_of_two_above
from torchq import QuantDescriptor, Rule
from torchq.calib import Calibrator, search_range
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import UINT8, PerAxis, PerTensor, integer_format
from torchq.functional import Range, fake_quantize
from torchq.nn import TensorQuantizer
from torchq.nn.weight_grid import shares_factors

AFFINE = QuantDescriptor(unsigned=True, symmetric=False)


def gelu(generator: torch.Generator, count: int = 6000) -> Tensor:
    """Return what GELU makes of normal values: a short negative side."""
    return nn.functional.gelu(torch.randn(count, generator=generator) * 2)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 3)
    )


def quantized(generator: torch.Generator, **fields: object) -> nn.Sequential:
    """Return a calibrated net whose inputs have asymmetric ranges."""
    model = net()
    descriptor = AFFINE.replace(**fields)
    rule = Rule("type:Linear", input=descriptor, weight=QuantDescriptor(axis=0))
    torchq.quantize_(model, torchq.QuantConfig((rule,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torchq.calibrate(
            model, [torch.randn(64, 6, generator=generator)], progress=False
        )
    return model


def test_a_quantizer_computes_what_the_oracle_does() -> None:
    q = TensorQuantizer(AFFINE.replace(amin=-0.17, amax=3.0))
    x = torch.linspace(-1, 4, 101)
    expected = [affine_fake_quantize(v, float(q.amin), 3.0)[2] for v in x.tolist()]
    assert q(x).tolist() == expected
    scale, zero_point = q.calculate_qparams()
    assert zero_point.dtype is torch.int32
    assert int(zero_point) == 14
    assert float(scale) == pytest.approx(3.17 / 255, rel=1e-6)
    assert "range=[-0.17, 3]" in repr(q)


def test_power_of_two_and_rounding_are_fields() -> None:
    q = TensorQuantizer(
        QuantDescriptor(amax=3.0, power_of_two=True, rounding="half_away")
    )
    assert float(q.scale) == power_of_two_above(3.0 / 127)
    ties = torch.tensor([0.5, 1.5, -0.5, -2.5]) * q.scale
    assert (q(ties) / q.scale).tolist() == [1, 2, -1, -3]
    both = TensorQuantizer(AFFINE.replace(amin=-1.0, amax=3.0, power_of_two=True))
    assert float(both.scale) == 2.0**-5  # 4 / 255 is a little more than 2**-6.


def test_percentile_leaves_out_each_side(generator: torch.Generator) -> None:
    x = torch.rand(100_000, generator=generator) * 3 - 1
    calibrator = Calibrator(
        "percentile",
        format=UINT8,
        granularity=PerTensor(),
        symmetric=False,
        percentile=99.0,
    )
    calibrator.collect(x)
    high, low = calibrator.range()
    assert low is not None
    # One percent of the values, whose quantiles are straight lines; a bin is 2 / 1024 wide.
    assert float(low) == pytest.approx(-0.97, abs=5e-3)
    assert float(high) == pytest.approx(1.97, abs=5e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_mse_is_better_than_the_whole_range(
    bits: int, generator: torch.Generator
) -> None:
    x = torch.cat([gelu(generator), torch.tensor([12.0])])
    format = integer_format(bits, unsigned=True)

    def error(range_: Range) -> float:
        return float(
            (fake_quantize(x, range_.high, format, amin=range_.low) - x).square().sum()
        )

    calibrator = Calibrator(
        "mse", format=format, granularity=PerTensor(), symmetric=False
    )
    calibrator.collect(x)
    actual = calibrator.range()
    searched = search_range(x, format, symmetric=False)
    largest = error(Range(x.max(), x.min()))
    # The histogram knows the centers of its bins alone. At 8 bits a code is four bins wide, which
    # is too coarse to tell errors that differ by a few percent.
    assert error(searched) <= error(actual) <= largest * (1.05 if bits == 8 else 1.0)
    assert bits == 8 or error(searched) < 0.7 * largest


def test_entropy_takes_one_threshold_for_both_sides(generator: torch.Generator) -> None:
    x = torch.cat([gelu(generator, 60_000), torch.tensor([90.0])])
    calibrator = Calibrator(
        "entropy", format=UINT8, granularity=PerTensor(), symmetric=False
    )
    calibrator.collect(x)
    high, low = calibrator.range()
    assert low is not None
    assert float(low) == float(x.min())
    assert 4 < float(high) < 30


def test_ranges_per_axis_and_dynamic(generator: torch.Generator) -> None:
    x = torch.randn(7, 3, 5, generator=generator) * torch.tensor([1.0, 3.0, 0.1]).view(
        3, 1
    )
    for method in ("max", "mse", "percentile"):
        q = TensorQuantizer(AFFINE.replace(axis=1, calib_method=method))
        q.calibrate_on(x)
        assert q.amin is not None
        assert q.amin.shape == q.amax.shape == (1, 3, 1)
        assert torch.equal(
            q(x), fake_quantize(x, q.amax, UINT8, PerAxis((1,)), amin=q.amin)
        )
    dynamic = TensorQuantizer(AFFINE.replace(dynamic=True))
    assert (
        float(dynamic(x).sub(x).abs().max())
        <= float(x.max() - x.min()) / 255 / 2 * 1.001
    )


def test_checkpoints_of_floats_and_of_half_a_range(generator: torch.Generator) -> None:
    model = quantized(generator)
    before = model[2].input_quantizer.range.map(torch.clone)
    model.load_state_dict(net().state_dict())
    assert all(map(torch.equal, model[2].input_quantizer.range, before))
    state = model.state_dict()
    del state["2.input_quantizer.amin"]
    with pytest.raises(RuntimeError, match=r'Missing key.* "2\.input_quantizer\.amin"'):
        model.load_state_dict(state)


@pytest.mark.parametrize("amin", [0.5, [-1.0, -1.0], torch.nan], ids=str)
def test_damaged_ends(amin: object, generator: torch.Generator, tmp_path: Path) -> None:
    torchq.save(quantized(generator), tmp_path / "a.pt")
    file = torch.load(tmp_path / "a.pt", weights_only=True)
    file["state_dict"]["0.input_quantizer.amin"] = torch.tensor(amin)
    torch.save(file, tmp_path / "a.pt")
    with pytest.raises(
        ConfigError, match=r"load: 0\.input_quantizer\.amin: .* is damaged"
    ):
        torchq.load(net(), tmp_path / "a.pt")


def test_learned_ends_are_trained(generator: torch.Generator) -> None:
    model = quantized(generator, learn_amax=True, scale_range_grad=True)
    groups = {g["name"]: g["params"] for g in torchq.qat.param_groups(model, lr=0.01)}
    assert len(groups["ranges"]) == 6
    before = [p.detach().clone() for p in groups["ranges"]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(64, 6, generator=generator) * 3).square().mean().backward()
    optimizer.step()
    moved = [
        not torch.equal(p, b) for p, b in zip(groups["ranges"], before, strict=True)
    ]
    assert all(moved)


def test_errors_name_what_is_wrong(generator: torch.Generator) -> None:
    q = TensorQuantizer(AFFINE)
    message = r"got set_amax for uint8 .*; expected both ends. Use set_"
    with pytest.raises(ConfigError, match=message):
        q.set_amax(1.0)
    with pytest.raises(
        ConfigError, match=r"got amin 0\.5; expected finite numbers <= 0"
    ):
        q.set_range(0.5, 1.0)
    with pytest.raises(
        ConfigError, match=r"got amin of shape \(2,\) and amax of shape \(\)"
    ):
        q.set_range([-1.0, -1.0], 1.0)
    with pytest.raises(ConfigError, match=r"got set_range for int8 .* Use set_amax"):
        TensorQuantizer().set_range(-1.0, 1.0)
    with pytest.raises(CalibrationError, match="got NaN or infinite values"):
        q.calibrate_on(torch.tensor([1.0, torch.nan]))
    assert not q.calibrated
    with pytest.warns(UserWarning, match="got 1 ranges as small as"):
        q.set_range(0.0, 1e-40)
    with pytest.raises(ConfigError, match="momentum"):
        TensorQuantizer(
            AFFINE.replace(calib_method="moving_average", calib_options={"momentum": 2})
        )


@pytest.mark.parametrize(
    ("axis", "shares"),
    [(None, False), (0, True)],
)
def test_one_range_of_two_ends_takes_no_factors_of_both_signs(
    axis: int | None, shares: bool
) -> None:
    """A negative factor turns a range round: its ends change places."""
    quantizer = TensorQuantizer(QuantDescriptor(symmetric=False, axis=axis))
    factor = torch.tensor([[2.0, 2.0], [-2.0, -2.0]], dtype=torch.float64)
    assert shares_factors(quantizer, factor) is shares
    assert shares_factors(quantizer, factor.abs())


def test_a_symmetric_range_takes_factors_of_both_signs() -> None:
    factor = torch.tensor([[2.0, 2.0], [-2.0, -2.0]], dtype=torch.float64)
    assert shares_factors(TensorQuantizer(QuantDescriptor()), factor)
    assert not shares_factors(TensorQuantizer(QuantDescriptor()), factor + 0.5)
