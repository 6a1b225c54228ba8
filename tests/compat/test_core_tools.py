"""Legacy models under torchq's own functions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor


def legacy_model() -> nn.Sequential:
    layers = quant_nn.QuantConv2d(3, 4, 3), quant_nn.QuantAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, quant_nn.QuantLinear(16, 2))


def batch() -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def test_calibrate() -> None:
    model = legacy_model()
    model[1].input_quantizer.disable()
    torchq.calibrate(model, [batch()], progress=False)
    assert model[0].input_quantizer.amax == batch().abs().max()
    expected = model[0].weight.detach().abs().amax((1, 2, 3), keepdim=True)
    assert model[0].weight_quantizer.amax.equal(expected)
    assert model[1].input_quantizer.amax is None
    assert model[1].input_quantizer._disabled
    quantizer = model[0].input_quantizer
    assert quantizer.mode == "quantize"
    assert quantizer.calibrator is None
    with pytest.warns(UserWarning, match="are calibrated already"):
        torchq.calibrate(model, [batch()], progress=False)


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("calib", [False, True])
def test_modes_map_to_the_flags_and_back(
    disabled: bool, quant: bool, calib: bool
) -> None:
    quantizer = quant_nn.TensorQuantizer(
        disabled=disabled, if_quant=quant, if_calib=calib
    )
    before = quantizer.mode
    on = [] if disabled else ["observe"] * calib + ["quantize"] * quant
    assert before == ("+".join(on) or "off")
    model = nn.Sequential(quantizer)
    with torchq.disabled(model, "*"):
        assert quantizer.mode == "off"
    assert quantizer.mode == before
    if disabled:  # what a script switched on below disable() is still there
        quantizer.enable()
        assert (quantizer._if_quant, quantizer._if_calib) == (quant, calib)
    for mode in ("off", "observe", "quantize", "observe+quantize"):
        quantizer.mode = mode
        assert quantizer.mode == mode


def test_summary_and_descriptor() -> None:
    model = legacy_model()
    torchq.calibrate(model, [batch()], progress=False)
    message = str(torchq.summary(model))
    assert "0._input_quantizer" in message
    assert "3._weight_quantizer" in message
    assert "int8" in message
    options: Any = {
        "axis": 0,
        "unsigned": True,
        "scale_amax": 0.5,
        "narrow_range": True,
    }
    actual = quant_nn.TensorQuantizer(QuantDescriptor(4, **options)).descriptor
    assert actual == torchq.QuantDescriptor(4, **options)
    float8 = quant_nn.TensorQuantizer(QuantDescriptor((4, 3), unsigned=True))
    assert float8.descriptor.format.name == "e4m3"


def test_step_and_range() -> None:
    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(amax=2.54, scale_amax=0.5))
    assert quantizer.calculate_qparams()[0].item() == pytest.approx(0.01)
    assert quantizer.range_for(batch()).high == pytest.approx(1.27)
    with pytest.raises(RuntimeError, match="the scale is not known"):
        _ = quant_nn.TensorQuantizer().calculate_qparams()
    quantizer.forget_amax()
    assert quantizer.amax is None
    assert not quantizer.calibrated
    quantizer.set_amax([1.0, 2.0])
    assert quantizer.amax.tolist() == [1, 2]


def test_restore_makes_float_modules() -> None:
    model = legacy_model()
    torchq.restore_(model)
    assert [type(m) for m in model] == [nn.Conv2d, nn.AvgPool2d, nn.Flatten, nn.Linear]
    assert not [name for name, _ in model.named_modules() if "quantizer" in name]
    assert torchq.quantize_(model).replaced


def test_saved_legacy_models_load_as_new_ones(tmp_path: Path) -> None:
    model = legacy_model()
    torchq.calibrate(model, [batch()], progress=False)
    torchq.save(model, tmp_path / "model.pt")
    fresh = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
    )
    torchq.load(fresh, tmp_path / "model.pt")
    names = ["QuantConv2d", "QuantAvgPool2d", "Flatten", "QuantLinear"]
    assert [type(m).__name__ for m in fresh] == names
    assert type(fresh[0]) is torchq.nn.QuantConv2d
    # q / (127 / amax) against q * (amax / 127): one rounding each.
    torch.testing.assert_close(
        fresh(batch()),
        model(batch()),
        rtol=1e-5,
        atol=1e-6,
    )


def test_freezing() -> None:
    learned = QuantDescriptor(learn_amax=True)
    model = nn.Sequential(quant_nn.QuantLinear(2, 2, quant_desc_input=learned))
    torchq.workflow.freeze_(model)
    assert not any(p.requires_grad for p in model[0].input_quantizer.parameters())


def test_legacy_and_new_modules_in_one_model() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        quant_nn.QuantLinear(4, 4),
    )
    report = torchq.quantize_(model, include=["0"])
    assert [d.name for d in report.replaced] == ["0"]
    torchq.calibrate(model, [torch.randn(8, 4)], progress=False)
    assert model(torch.randn(2, 4)).shape == (2, 4)


@pytest.mark.filterwarnings("ignore")  # of the exporter about itself
def test_export_and_verify(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    model = legacy_model().eval()
    torchq.calibrate(model, [batch()], progress=False)
    torchq.export_onnx(
        model,
        (batch(),),
        tmp_path / "model.onnx",
        dynamo=True,
    )
    report = torchq.verify_onnx(model, tmp_path / "model.onnx", [batch()])
    assert report.ok
    assert ": 0 of " in str(report)
