"""Old state dicts and old pickles load, here and in torchq's own modules."""

import copy
import io
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.compat.pytorch_quantization import calib, quant_modules
from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor

AMAX = [
    torch.tensor(2.5),
    torch.tensor([2.5]),
    torch.full((1, 1, 1, 1), 2.5),
]
PER_CHANNEL = [torch.arange(1.0, 5.0), torch.arange(1.0, 5.0).reshape(4, 1, 1, 1)]


def floats() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def legacy_model() -> nn.Sequential:
    conv = quant_nn.QuantConv2d(3, 4, 3)
    linear = quant_nn.QuantLinear(16, 2)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), linear)


def core_model() -> nn.Sequential:
    model = floats()
    torchq.quantize_(model)
    return model


def assert_nearly_equal(one: nn.Module, other: nn.Module, x: Tensor) -> None:
    """Compare two modules but for roundings.

    q / (127 / amax) and q * (amax / 127) differ by one, so a sum of 27 products may by a few.
    """
    torch.testing.assert_close(one(x), other(x), rtol=1e-5, atol=1e-6)


def old_state(input_amax: Tensor, weight_amax: Tensor) -> dict[str, Tensor]:
    """As the original saved it."""
    ranges = {
        "0._input_quantizer._amax": input_amax,
        "0._weight_quantizer._amax": weight_amax,
    }
    ranges["3._input_quantizer._amax"] = torch.tensor(1.5)
    ranges["3._weight_quantizer._amax"] = torch.tensor([[0.2], [0.3]])
    return {**floats().state_dict(), **ranges}


@pytest.mark.parametrize("input_amax", AMAX, ids=lambda t: str(tuple(t.shape)))
@pytest.mark.parametrize("weight_amax", PER_CHANNEL, ids=lambda t: str(tuple(t.shape)))
@pytest.mark.parametrize("assign", [False, True])
def test_old_keys_load_strictly_in_both(
    input_amax: Tensor, weight_amax: Tensor, assign: bool
) -> None:
    state = old_state(input_amax, weight_amax)
    legacy = legacy_model()
    core = core_model()
    for model in (legacy, core):
        copied = {k: v.clone() for k, v in state.items()}
        assert model.load_state_dict(copied, strict=True, assign=assign) == ([], [])
        assert model[0].input_quantizer.amax.equal(input_amax)
        assert model[0].weight_quantizer.amax.equal(weight_amax)
    x = torch.randn(2, 3, 4, 4)
    assert_nearly_equal(legacy, core, x)
    assert list(state) == list(old_state(input_amax, weight_amax))


def test_checkpoints_of_networks_with_average_pools_load_by_the_shortest_way() -> None:
    """The original quantizes average pools wherever it replaces classes, so files have ranges."""

    def floats_with_pool() -> nn.Sequential:
        return nn.Sequential(*floats()[:2], nn.AdaptiveAvgPool2d(1), nn.AvgPool2d(1))

    quant_modules.initialize()
    legacy = floats_with_pool()
    quant_modules.deactivate()
    for module in legacy.modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            module.amax = 2.0
    model: Any = floats_with_pool()
    torchq.quantize_(model, torchq.recipes.int8(pooling=True))
    assert model.load_state_dict(legacy.state_dict(), strict=True) == ([], [])
    assert model[2].input_quantizer.amax == model[3].input_quantizer.amax == 2.0
    x = torch.tensor([[[[0.3, -1.7]]]])  # no tie between two codes
    assert_nearly_equal(legacy[2], model[2], x)


def test_core_checkpoints_load_in_legacy_modules() -> None:
    core = core_model()
    uncalibrated = copy.deepcopy(core.state_dict())
    batches = [torch.randn(256, 3, 4, 4)]
    torchq.calibrate(core, batches, progress=False)
    with pytest.raises(
        RuntimeError, match=r"\d\.output_shift: corrects a result.*correct=False"
    ):
        legacy_model().load_state_dict(core.state_dict(), strict=True)
    torchq.calibrate(core, batches, force=True, correct=False, progress=False)
    legacy = legacy_model()
    legacy.load_state_dict(core.state_dict(), strict=True)
    x = torch.randn(2, 3, 4, 4)
    assert_nearly_equal(legacy, core, x)
    fresh = legacy_model()
    fresh.load_state_dict(uncalibrated, strict=True)
    assert fresh[0].input_quantizer.amax is None


def test_a_float_checkpoint_leaves_ranges_alone() -> None:
    model = legacy_model()
    model[0].input_quantizer.amax = 3.0
    assert model.load_state_dict(floats().state_dict(), strict=True) == ([], [])
    assert model[0].input_quantizer.amax == 3


def test_unknown_keys_are_still_unexpected() -> None:
    state = old_state(AMAX[0], PER_CHANNEL[0])
    state["0._input_quantizer.other"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"0\._input_quantizer\.other"):
        legacy_model().load_state_dict(state)


def test_learned_and_scaled_quantizers_round_trip(tmp_path: Path) -> None:
    first = quant_nn.TensorQuantizer(QuantDescriptor(learn_amax=True, amax=0.5))
    first.pre_quant_scale = [1.0, 2.0]
    torch.save(first.state_dict(), tmp_path / "q.pth")
    clip = {"clip.clip_value_min", "clip.clip_value_max"}
    assert set(first.state_dict()) == {"_amax", "_pre_quant_scale", *clip}
    second = quant_nn.TensorQuantizer(QuantDescriptor(learn_amax=True))
    second.load_state_dict(
        torch.load(tmp_path / "q.pth", weights_only=True), strict=True
    )
    assert second.clip.clip_value_max == second.amax == 0.5
    assert second.pre_quant_scale.tolist() == [1, 2]


def test_half_precision_ranges_become_float32() -> None:
    quantizer = quant_nn.TensorQuantizer()
    quantizer.load_state_dict({"_amax": torch.tensor(0.1).half()})
    assert quantizer.amax.dtype is torch.float32
    assert quantizer.amax == torch.tensor(0.1).half().float()


# Whole modules as the original pickled them have the same class names, and only its attributes.


@pytest.fixture
def old_names(legacy: ModuleType) -> Iterator[None]:
    """Pickle our classes under the names that the original's had."""
    paths = {
        quant_nn.TensorQuantizer: "nn.modules.tensor_quantizer",
        quant_nn.QuantConv2d: "nn.modules.quant_conv",
        calib.MaxCalibrator: "calib.max",
        calib.HistogramCalibrator: "calib.histogram",
    }
    own = {cls: cls.__module__ for cls in paths}
    for cls, path in paths.items():
        cls.__module__ = f"pytorch_quantization.{path}"
    yield
    for cls, name in own.items():
        cls.__module__ = name


def old_pickle(module: nn.Module, calibrators: dict[str, Any]) -> bytes:
    """Return what the original wrote for ``module``: its calibrators hold arrays only."""
    module = copy.deepcopy(module)
    for name, state in calibrators.items():
        calibrator = module.get_submodule(name)._calibrator
        calibrator.__dict__.clear()
        calibrator.__dict__.update(state)
    for part in module.modules():
        if isinstance(part, quant_nn.TensorQuantizer):
            assert not {"name", "calibrator", "descriptor", "mode"} & set(vars(part))
    return pickle.dumps(module)


def test_pickled_modules_of_the_original_load(old_names: None) -> None:
    by_histogram = QuantDescriptor(calib_method="histogram")
    layer = quant_nn.QuantConv2d(3, 4, 3, quant_desc_input=by_histogram)
    layer.input_quantizer.amax = 2.0
    common = {"_num_bits": 8, "_unsigned": False}
    histogram = {
        **common,
        "_axis": None,
        "_num_bins": 4,
        "_skip_zeros": False,
        "_torch_hist": True,
    }
    histogram["_calib_hist"] = np.array([1.0, 0.0, 2.0, 1.0])
    histogram["_calib_bin_edges"] = np.linspace(0, 2, 5)
    maximum = {
        **common,
        "_axis": 0,
        "_track_amax": False,
        "_calib_amax": torch.tensor(3.0),
    }
    data = old_pickle(
        layer, {"_input_quantizer": histogram, "_weight_quantizer": maximum}
    )
    assert b"torchq" not in data
    assert "pytorch_quantization" in sys.modules
    loaded = pickle.loads(data)
    x = torch.randn(1, 3, 5, 5)
    assert loaded(x).equal(layer(x))
    assert (
        loaded.input_quantizer._calibrator.compute_amax("percentile", percentile=70)
        == 1.0
    )
    loaded.input_quantizer._calibrator.collect(torch.tensor([4.0]))
    assert loaded.input_quantizer._calibrator._calib_hist.sum() == 5
    assert loaded.weight_quantizer._calibrator.compute_amax() == 3.0
    loaded.weight_quantizer._calibrator.reset()
    loaded.weight_quantizer._calibrator.collect(layer.weight)
    loaded.weight_quantizer.load_calib_amax()
    assert loaded.weight_quantizer.amax.shape == (4, 1, 1, 1)
    buffer = io.BytesIO()
    torch.save(loaded, buffer)
    assert buffer.tell() > 0
    assert repr(loaded)
