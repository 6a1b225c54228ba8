"""The legacy quantizer: switches, ranges, scales, learned clipping."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from torchq.compat.pytorch_quantization import calib, tensor_quant, utils
from torchq.compat.pytorch_quantization.nn import TensorQuantizer
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_default_is_eight_bits_of_each_call() -> None:
    x = draw(3, 7)
    quantizer = TensorQuantizer()
    assert quantizer(x).equal(tensor_quant.fake_tensor_quant(x, x.abs().max()))
    assert quantizer.amax is None
    assert not hasattr(quantizer, "_amax")
    assert not quantizer.state_dict()


def test_real_quantization_sets_the_scale() -> None:
    x = draw(3, 7)
    quantizer = TensorQuantizer(QuantDescriptor(num_bits=8, fake_quant=False))
    assert quantizer.scale is None
    codes, scale = tensor_quant.tensor_quant(x, x.abs().max())
    assert quantizer(x).equal(codes)
    assert quantizer.scale.equal(scale)


def test_properties_and_setters() -> None:
    quantizer = TensorQuantizer(QuantDescriptor(amax=3.14))
    quantizer.amax = 0.577
    assert quantizer.amax.item() == np.float32(0.577)
    assert quantizer.step_size == 0.577 / 127.0
    quantizer.num_bits, quantizer.unsigned, quantizer.narrow_range = 7, True, True
    expected = {"num_bits": 7, "unsigned": True, "narrow_range": True, "axis": None}
    expected |= {"fake_quant": True, "learn_amax": False, "scale": 1.0}
    for name, value in expected.items():
        assert getattr(quantizer, name) == getattr(quantizer, f"_{name}") == value
    assert quantizer.maxbound == 127
    assert TensorQuantizer(QuantDescriptor(num_bits=(4, 3))).maxbound == 448.0
    assert TensorQuantizer().step_size is None
    for source in (np.array([3.142, 2.718]), [1, 2], torch.ones(2)):
        vector = TensorQuantizer()
        vector.amax = source
        wanted = torch.as_tensor(source).float()
        assert vector.amax.dtype is torch.float32
        assert vector.amax.equal(wanted)
        assert vector.amax is not source


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ([1.0, 2.0], TypeError, "Changing shape"),
        (None, ValueError, "amax: got None"),
        (-1.0, ValueError, "expected no negative values"),
    ],
)
def test_amax_setter_errors(value: Any, error: type[Exception], text: str) -> None:
    quantizer = TensorQuantizer(QuantDescriptor(amax=1.0))
    with pytest.raises(error, match=text):
        quantizer.amax = value
    assert quantizer.amax == 1.0


def test_a_private_range_is_a_buffer() -> None:
    quantizer = TensorQuantizer()
    quantizer._amax = torch.tensor(2.0)
    assert quantizer.state_dict()["_amax"] == 2
    quantizer._amax.fill_(3.0)
    quantizer._amax = torch.max(quantizer._amax, torch.tensor(5.0)).to("cpu")
    assert quantizer.amax == 5
    assert copy.deepcopy(quantizer).amax == 5
    del quantizer._amax
    assert quantizer.amax is None


def test_scale_amax_is_not_cumulative() -> None:
    x = draw(100)
    quantizer = TensorQuantizer(QuantDescriptor(amax=0.5, scale_amax=0.9))
    expected = tensor_quant.fake_tensor_quant(
        x, torch.tensor(0.5) * 0.9, 8, False, False
    )
    for _ in range(3):
        assert quantizer(x).equal(expected)
    assert quantizer.amax == 0.5
    assert quantizer._get_amax(x).item() == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("options", "calls", "result"),
    [
        ({}, [], "quantized"),
        ({"disabled": True}, [], "same"),
        ({"disabled": True}, ["enable"], "quantized"),
        ({}, ["disable"], "same"),
        ({"if_quant": False}, [], "same"),
        ({"if_quant": False}, ["enable_quant"], "quantized"),
        ({}, ["disable_quant"], "same"),
        ({"if_calib": True}, [], "quantized"),
        ({}, ["enable_calib", "disable_calib"], "quantized"),
    ],
)
def test_switches(options: dict[str, bool], calls: list[str], result: str) -> None:
    quantizer = TensorQuantizer(QuantDescriptor(amax=1.0), **options)
    for call in calls:
        getattr(quantizer, call)()
    x = draw(9)
    assert (quantizer(x) is x) == (result == "same")
    assert quantizer._if_calib == bool(options.get("if_calib"))
    assert (quantizer._calibrator.compute_amax() is not None) == quantizer._if_calib


def test_max_calibration() -> None:
    quantizer = TensorQuantizer(QuantDescriptor(axis=0))
    quantizer.enable_calib()
    with pytest.raises(RuntimeError, match="Calibrator returned None"):
        quantizer.load_calib_amax()
    first = draw(6, 4, 3, 3)
    second = draw(6, 4, 3, 3, seed=1)
    quantizer(first)
    quantizer(second)
    expected = torch.maximum(
        *(utils.reduce_amax(x, axis=(1, 2, 3)) for x in (first, second))
    )
    assert quantizer._calibrator.compute_amax().equal(expected)
    quantizer.load_calib_amax()
    assert quantizer.amax.equal(expected)
    assert quantizer.amax.shape == (6, 1, 1, 1)
    pairs = TensorQuantizer(QuantDescriptor(axis=(0, 1)), if_calib=True, if_quant=False)
    assert pairs(first) is first
    pairs.load_calib_amax()
    assert pairs.amax.numel() == 24


@pytest.mark.parametrize("method", ["entropy", "mse", "percentile"])
def test_histogram_calibration(method: str) -> None:
    histogram = QuantDescriptor(calib_method="histogram")
    quantizer = TensorQuantizer(histogram, if_calib=True, if_quant=False)
    assert isinstance(quantizer._calibrator, calib.HistogramCalibrator)
    for seed in range(2):
        quantizer(draw(500, seed=seed))
    options = {"percentile": 99.0} if method == "percentile" else {}
    quantizer.load_calib_amax(strict=False, method=method, **options)
    assert quantizer.amax.equal(quantizer._calibrator.compute_amax(method, **options))
    quantizer._calibrator.reset()
    with pytest.raises(RuntimeError, match="Calibrator returned None"):
        quantizer.load_calib_amax(method)


def test_nothing_seen_with_strict_off_gives_nan() -> None:
    quantizer = TensorQuantizer(if_calib=True)
    with pytest.warns(UserWarning, match="Calibrator returned None"):
        quantizer.load_calib_amax(strict=False)
    assert quantizer.amax.isnan()


def test_without_a_calibrator() -> None:
    quantizer = TensorQuantizer()
    quantizer._calibrator = None
    with pytest.raises(ValueError, match="Calibrator was not created"):
        quantizer.enable_calib()
    with pytest.raises(RuntimeError, match="Calibrator not created"):
        quantizer.load_calib_amax()
    quantizer._if_calib = True
    with pytest.raises(RuntimeError, match="Calibrator was not created"):
        quantizer(draw(2))
    with pytest.raises(ValueError, match="calib_method: got 'oops'"):
        TensorQuantizer(QuantDescriptor(calib_method="oops"))


def test_pre_quant_scale() -> None:
    x = torch.tensor([[0, 0.4, 1.1, 2.0]])
    quantizer, other = (
        TensorQuantizer(QuantDescriptor(axis=1, amax=127.0)) for _ in range(2)
    )
    assert quantizer.pre_quant_scale is None
    assert quantizer(x).tolist() == [[0, 0, 1, 2]]
    quantizer.pre_quant_scale = 2.0
    assert quantizer(x).tolist() == [[0, 1, 2, 4]]
    other.pre_quant_scale = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert other(x).tolist() == [[0, 1, 3, 8]]
    other.disable()
    torch.testing.assert_close(
        other(x),
        torch.tensor([[0, 0.8, 3.3, 8.0]]),
    )
    assert other(x.bfloat16()).dtype is torch.bfloat16
    with pytest.raises(TypeError, match="Changing shape"):
        other.pre_quant_scale = 1.0


def test_learned_range_clips_and_learns() -> None:
    x = draw(200).requires_grad_()
    quantizer = TensorQuantizer(QuantDescriptor(num_bits=8, amax=0.5, learn_amax=True))
    assert quantizer._if_clip
    assert quantizer._learn_amax
    actual = quantizer(x)
    assert actual.equal(
        tensor_quant.fake_tensor_quant(x.clamp(-0.5, 0.5), torch.tensor(0.5))
    )
    actual.sum().backward()
    assert quantizer.clip.clip_value_max.grad == (x > 0.5).sum()
    assert quantizer.clip.clip_value_min.grad == (x < -0.5).sum()
    assert x.grad.equal((x.abs() < 0.5).float())
    quantizer.disable_clip()
    assert not quantizer.clip.clip_value_max.requires_grad
    assert not quantizer._if_clip
    learned = QuantDescriptor(amax=0.5, learn_amax=True)
    clipping = TensorQuantizer(learned, if_quant=False, if_clip=True)
    assert clipping(x).equal(x.clamp(-0.5, 0.5))
    with pytest.raises(ValueError, match="learn_amax is False"):
        TensorQuantizer(if_clip=True)
    with pytest.raises(ValueError, match="must be scalar"):
        TensorQuantizer(QuantDescriptor(amax=[1.0, 2.0], learn_amax=True))


def test_init_learn_amax() -> None:
    quantizer = TensorQuantizer(QuantDescriptor(learn_amax=True), if_calib=True)
    with pytest.raises(RuntimeError, match="init_learn_amax without a range"):
        quantizer.init_learn_amax()
    x = draw(50)
    quantizer(x)
    quantizer.load_calib_amax()
    quantizer.init_learn_amax()
    assert (
        quantizer.clip.clip_value_max == x.abs().max() == -quantizer.clip.clip_value_min
    )
    assert quantizer.calculate_qparams()[0] == x.abs().max() / 127
    with pytest.raises(RuntimeError, match="init_learn_amax without learn_amax=True"):
        TensorQuantizer().init_learn_amax()


def test_dtype_and_device_moves_keep_the_range_exact() -> None:
    quantizer = TensorQuantizer(QuantDescriptor(amax=0.1))
    quantizer.pre_quant_scale = 0.3
    for move in (quantizer.half, quantizer.bfloat16, quantizer.double):
        move()
        kept = quantizer.amax.item(), quantizer.pre_quant_scale.item()
        assert kept == (np.float32(0.1), np.float32(0.3))
        assert quantizer.amax.dtype is torch.float32
    assert quantizer.to("meta").amax.is_meta


def test_dtype_and_layout_of_the_result(dtype: torch.dtype) -> None:
    x = draw(2, 4, 5, 5).to(dtype).contiguous(memory_format=torch.channels_last)
    actual = TensorQuantizer(QuantDescriptor(axis=1))(x)
    assert actual.dtype is dtype
    assert actual.is_contiguous(memory_format=torch.channels_last)


def test_printed_forms() -> None:
    descriptor = QuantDescriptor(axis=0, amax=[1.0, 2.0], unsigned=True, scale_amax=0.5)
    message = TensorQuantizer(descriptor, if_calib=True).extra_repr()
    assert message.startswith(
        "unsigned 8bit fake axis=0 amax=[1.0000, 2.0000](2) *0.5 calibrator=Max"
    )
    assert TensorQuantizer(disabled=True).extra_repr() == "disabled"
    assert "amax=dynamic" in repr(TensorQuantizer())
    assert "amax=0.5000" in repr(TensorQuantizer(QuantDescriptor(amax=0.5)))
    assert "learned" in TensorQuantizer(QuantDescriptor(learn_amax=True)).extra_repr()


# torch 2.9's tracer warns about what it does itself.
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("num_bits", [8, (4, 3)], ids=str)
def test_compiles_as_one_graph(num_bits: Any) -> None:
    torch._dynamo.reset()
    quantizer = TensorQuantizer(QuantDescriptor(num_bits, amax=1.0))
    x = draw(20).requires_grad_()
    actual = torch.compile(quantizer, fullgraph=True, backend="aot_eager")(x)
    assert actual.equal(quantizer(x))
    actual.sum().backward()
    assert x.grad.equal((x.abs() <= 1).float())


def test_traces_with_fx() -> None:
    options: list[Any] = [{"amax": 1.0}, {"axis": 0}]
    model = torch.nn.Sequential(
        *(TensorQuantizer(QuantDescriptor(**given)) for given in options)
    )

    class Inside(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
            return False

    x = draw(3, 4)
    traced = torch.fx.GraphModule(model, Inside().trace(model))
    assert traced(x).equal(model(x))
