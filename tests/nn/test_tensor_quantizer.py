"""TensorQuantizer: modes, ranges, learned ranges, observing."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from torchq import QuantDescriptor, TensorQuantizer
from torchq.calib import search_range
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import CATALOG, INT4, PerAxis, PerBlock
from torchq.functional import (
    fake_quantize,
    learned_fake_quantize,
    quantize,
    reduce_amax,
    scale_from_amax,
)

MODES = {
    "off": (False, False),
    "observe": (True, False),
    "quantize": (False, True),
    "observe+quantize": (True, True),
}


@pytest.fixture
def x(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 3, 5, generator=generator)


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, x: torch.Tensor) -> None:
    q = TensorQuantizer(QuantDescriptor(amax=1.0), mode=mode)
    assert q.mode == mode
    assert (q.observing, q.quantizing) == MODES[mode]
    y = q(x)
    assert torch.equal(y, fake_quantize(x, 1.0) if q.quantizing else x)
    assert (q.calibrator is not None and q.calibrator.seen) == q.observing
    if not q.quantizing:
        assert y is x
    q.observing = not q.observing
    assert MODES[q.mode] == (q.observing, q.quantizing)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"TensorQuantizer: got mode 'on'; expected one of off, observe, quantize, "
        r"observe\+quantize",
    ):
        TensorQuantizer(mode="on")
    q = TensorQuantizer()
    q.name = "layer.input_quantizer"
    for bad in ("", None, ["off"]):
        with pytest.raises(
            ConfigError, match=r"layer.input_quantizer: got mode .*; expected one"
        ):
            q.mode = bad  # type: ignore[assignment]
    assert q.mode == "quantize"


DESCRIPTORS = [
    QuantDescriptor(),
    QuantDescriptor(4, axis=1, narrow_range=True),
    QuantDescriptor(unsigned=True),
    QuantDescriptor((4, 3), axis=(0, 1)),
    QuantDescriptor(4, block_size=2),
    QuantDescriptor((2, 1), block_size=4, scale_format="e8m0"),
    QuantDescriptor(scale_amax=0.5),
    QuantDescriptor(learn_amax=True),
    QuantDescriptor(dynamic=True),
]


@pytest.mark.filterwarnings("ignore:.*got negative values")
@pytest.mark.parametrize("d", DESCRIPTORS, ids=str)
def test_quantizes_as_described(d: QuantDescriptor, x: torch.Tensor) -> None:
    """An uncalibrated quantizer uses the range of the call, a calibrated one the observed range."""
    q = TensorQuantizer(d)
    assert not q.calibrated
    assert q.amax.shape == (0,)

    def by_hand(data: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        return fake_quantize(
            data,
            amax * (d.scale_amax or 1.0),
            d.format,
            d.granularity,
            d.block_scale_format,
        )

    assert torch.equal(
        q(x),
        by_hand(x, reduce_amax(x, d.granularity)),
    )
    q.start_calibration()
    assert q.observing
    assert q.quantizing
    q(x)
    q(x / 2)
    q.finish_calibration()
    assert q.calibrated
    assert not q.observing
    assert q.calibrator is None
    assert q.amax.dtype is torch.float32
    assert q.amax.shape == d.granularity.amax_shape(x.shape)
    fixed = reduce_amax(x.clamp(min=0) if d.unsigned else x, d.granularity)
    assert torch.equal(q.amax, fixed)
    assert torch.equal(
        q(x * 3),
        by_hand(x * 3, reduce_amax(x * 3, d.granularity) if d.dynamic else fixed),
    )
    assert torch.equal(
        q.scale,
        scale_from_amax(fixed * (d.scale_amax or 1.0), d.format, d.block_scale_format),
    )


def test_codes_instead_of_values(x: torch.Tensor) -> None:
    q = TensorQuantizer(QuantDescriptor(4, fake_quant=False, amax=1.0))
    assert torch.equal(
        q(x),
        quantize(x, 1.0, CATALOG["int4"]),
    )


def test_a_fixed_range_is_there_from_the_start() -> None:
    assert TensorQuantizer(QuantDescriptor(amax=2.0)).amax.tolist() == 2.0
    q = TensorQuantizer(QuantDescriptor(axis=0, amax=[[1.0], [2.0]]))
    assert torch.equal(q.scale, torch.tensor([[1.0], [2.0]]) / torch.tensor(127.0))


def test_pre_quant_scale_multiplies_in_every_mode(x: torch.Tensor) -> None:
    q = TensorQuantizer(QuantDescriptor(amax=1.0))
    q.pre_quant_scale = torch.tensor([0.5, 1.0, 2.0]).view(3, 1)
    assert torch.equal(
        q(x),
        fake_quantize(x * q.pre_quant_scale, 1.0),
    )
    q.mode = "off"
    assert torch.equal(q(x), x * q.pre_quant_scale)
    assert q(x.half()).dtype is torch.float16
    twin = TensorQuantizer(QuantDescriptor())
    twin.load_state_dict(q.state_dict())
    assert twin.pre_quant_scale is not None
    assert torch.equal(twin.pre_quant_scale, q.pre_quant_scale)


def test_set_amax() -> None:
    q = TensorQuantizer(QuantDescriptor(axis=0))
    source = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    q.set_amax(source)
    source.zero_()
    assert q.amax.tolist() == [[1.0], [2.0]]
    assert q.amax.dtype is torch.float32
    q.set_amax(3)
    assert q.amax.shape == ()
    assert q.amax.item() == 3.0
    q.forget_amax()
    assert not q.calibrated


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (
            lambda q: q.scale,
            r"a.b: the scale is not known; expected a calibrated amax. Run torchq.calibrate",
        ),
        (
            lambda q: q.finish_calibration(),
            "a.b: has not seen any tensor; expected at least one batch in mode 'observe'",
        ),
    ],
)
def test_errors_name_the_quantizer(act: Any, text: str) -> None:
    q = TensorQuantizer()
    q.name = "a.b"
    with pytest.raises(CalibrationError, match=text):
        act(q)


def test_bad_statistics_leave_the_range_alone(x: torch.Tensor) -> None:
    q = TensorQuantizer(QuantDescriptor(amax=1.5))
    q.name = "a.b"
    q.start_calibration()
    q(x.clone().index_fill_(0, torch.tensor([0]), math.nan))
    with pytest.raises(CalibrationError, match=r"^a.b: .*NaN or infinite values"):
        q.finish_calibration()
    assert q.amax.item() == 1.5


def test_unknown_calibration_method_is_an_error_at_once() -> None:
    with pytest.raises(
        ConfigError, match="unknown calibration method 'maximum'; expected one of"
    ):
        TensorQuantizer(QuantDescriptor(calib_method="maximum"))
    with pytest.raises(ConfigError, match="percentil"):
        TensorQuantizer(
            QuantDescriptor(calib_method="percentile", calib_options={"percentil": 99})
        )


def test_blocks_of_a_weight_are_searched_for_the_least_error() -> None:
    w = torch.randn(6, 70)
    w[:, 5] *= 4
    q = TensorQuantizer(QuantDescriptor(4, block_size=32, calib_method="mse"))
    q.calibrate_on(w)
    assert torch.equal(q.amax, search_range(w, INT4, PerBlock(32)).high)
    assert bool((q.amax < reduce_amax(w, PerBlock(32))).any())
    q.name = "fc.input_quantizer"
    with pytest.raises(
        ConfigError, match=r"^fc.input_quantizer: histogram: got PerBlock"
    ):
        q.start_calibration()  # of activations, whose tensors are not at hand


def test_calibrate_on_keeps_what_was_being_observed(x: torch.Tensor) -> None:
    q = TensorQuantizer(QuantDescriptor(axis=1), mode="observe")
    q(x)
    pending = q.calibrator
    q.calibrate_on(x * 2)
    assert torch.equal(q.amax, reduce_amax(x * 2, PerAxis((1,))))
    assert q.calibrator is pending
    assert q.mode == "observe"


def test_learned_range_is_a_parameter_that_stays_itself(x: torch.Tensor) -> None:
    """An optimizer built before calibration goes on training it.

    A learned range follows its gradient.
    """
    q = TensorQuantizer(QuantDescriptor(4, learn_amax=True))
    parameter = q.amax
    assert isinstance(parameter, nn.Parameter)
    optimizer = torch.optim.SGD(q.parameters(), lr=0.1)
    q.calibrate_on(x)
    assert q.amax is parameter
    assert parameter.requires_grad
    before = parameter.detach().clone()
    q(x).square().sum().backward()
    expected = before.clone().requires_grad_()
    learned_fake_quantize(x, expected, CATALOG["int4"]).square().sum().backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, expected.grad)
    optimizer.step()
    torch.testing.assert_close(q.amax, before - 0.1 * expected.grad)  # type: ignore[operator]
    q.set_amax(2.0)
    assert q.amax is parameter
    assert parameter.item() == 2.0
    q.load_state_dict({"amax": torch.tensor(3.0)})
    assert q.amax is parameter
    assert parameter.item() == 3.0


def test_half_between_backward_and_step() -> None:
    """``.half()`` between backward and step: the range stays float32, and so must its gradient."""
    q = TensorQuantizer(QuantDescriptor(amax=1.0, learn_amax=True))
    q(torch.randn(8)).sum().backward()
    q.half()
    assert q.amax.grad is not None
    assert q.amax.dtype is q.amax.grad.dtype is torch.float32
    torch.optim.SGD(q.parameters(), lr=0.1).step()


def test_repr_tells_what_it_does() -> None:
    assert (
        repr(TensorQuantizer())
        == "TensorQuantizer(int8 per-tensor max, amax=unknown, quantize)"
    )
    assert "amax=1.5, off" in repr(
        TensorQuantizer(QuantDescriptor(amax=1.5), mode="off")
    )
    assert "amax=1 .. 2 (2)" in repr(
        TensorQuantizer(QuantDescriptor(axis=0, amax=[1.0, 2.0]))
    )
    delegating = TensorQuantizer()
    delegating.delegate = lambda x, quantizer: x
    assert "delegated" in repr(delegating)
    with pytest.raises(ConfigError, match="got the delegate 3; expected a function"):
        delegating.delegate = 3  # type: ignore[assignment]
    assert "amax=dynamic" in repr(TensorQuantizer(QuantDescriptor(dynamic=True)))
    assert "amax=meta" in repr(
        TensorQuantizer(QuantDescriptor(amax=1.0), device=torch.device("meta"))
    )


def test_quantizing_needs_no_range_for_an_empty_batch() -> None:
    q = TensorQuantizer()
    assert q(torch.empty(0, 3)).shape == (0, 3)
    q.start_calibration()
    q(torch.empty(0, 3))
    with pytest.raises(CalibrationError, match="has not seen any tensor"):
        q.finish_calibration()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e39, "got amax 1e"),
        (torch.tensor(1e39, dtype=torch.float64), "got amax"),
        (10**400, "got an amax of which"),
        ([[1.0, 2.0], [3.0]], "got an amax of which"),
        ([], r"shape \(0,\)"),
        (1j, "dtype torch.complex64"),
        ("1", "got an amax of which"),
        (None, "got an amax of which"),
        ([1.0, math.nan], "got amax"),
        (math.inf, "got amax"),
        (-1.0, "got amax -1.0"),
    ],
)
def test_a_range_that_is_none_is_refused(value: Any, text: str) -> None:
    quantizer = TensorQuantizer()
    quantizer.set_amax(2.0)
    with pytest.raises(
        ConfigError, match=f"TensorQuantizer: .*{text}.*; expected finite numbers"
    ):
        quantizer.set_amax(value)
    assert quantizer.amax == 2.0


def test_a_range_without_a_scale_is_said_to_be_lost() -> None:
    quantizer = TensorQuantizer(QuantDescriptor(axis=0))
    with pytest.warns(
        UserWarning, match="got 1 ranges as small as 1e-38; their scales are no"
    ):
        quantizer.set_amax([1.0, 1e-38])
    quantizer.set_amax([1.0, 0.0])  # A dead channel is nothing to warn of.
    quantizer.set_amax([1.0, 1e-30])
