"""Replacing classes in torch.nn, and getting them back."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchq.compat.pytorch_quantization as package
from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization import quant_modules
from torchq.compat.pytorch_quantization.quant_modules import (
    QuantModuleReplacementHelper,
)

REPLACED = [entry.mod_name for entry in quant_modules._DEFAULT_QUANT_MAP]


def current() -> dict[str, type]:
    return {name: getattr(torch.nn, name) for name in REPLACED}


PLAIN = current()


def test_default_map() -> None:
    assert len(REPLACED) == len(set(REPLACED)) == 15
    for entry in quant_modules._DEFAULT_QUANT_MAP:
        quantized = getattr(quant_nn, f"Quant{entry.mod_name}")
        assert entry.orig_mod is torch.nn
        assert entry.replace_mod is quantized
        assert issubclass(entry.replace_mod, PLAIN[entry.mod_name])


def test_initialize_and_deactivate() -> None:
    quant_modules.initialize()
    try:
        layers = torch.nn.Conv2d(1, 2, 3), torch.nn.MaxPool2d(2), torch.nn.Flatten()
        model = nn.Sequential(*layers, torch.nn.Linear(8, 2))
        assert type(torch.nn.Linear(16, 256, 3)) is quant_nn.QuantLinear
        replaced = {
            entry.mod_name: entry.replace_mod
            for entry in quant_modules._DEFAULT_QUANT_MAP
        }
        assert current() == replaced
    finally:
        quant_modules.deactivate()
    assert current() == PLAIN
    names = ["QuantConv2d", "MaxPool2d", "Flatten", "QuantLinear"]
    assert [type(m).__name__ for m in model] == names
    assert model(torch.randn(3, 1, 6, 6)).shape == (3, 2)


def test_a_custom_map_wins_over_the_skip_list() -> None:
    helper = QuantModuleReplacementHelper()
    own = {"Linear": quant_nn.QuantLinear, "Conv2d": quant_nn.QuantConv1d}
    helper.prepare_state(
        ["Linear"],
        [(torch.nn, *entry) for entry in own.items()],
    )
    helper.apply_quant_modules()
    try:
        assert torch.nn.Linear is quant_nn.QuantLinear
        assert torch.nn.Conv2d is quant_nn.QuantConv1d
    finally:
        helper.restore_float_modules()
    assert current() == PLAIN


def test_twice_is_undone_by_once() -> None:
    package.initialize(["Linear"])
    assert torch.nn.Linear is PLAIN["Linear"]
    assert torch.nn.Conv2d is quant_nn.QuantConv2d
    quant_modules.initialize(["Conv1d"])
    quant_modules.deactivate()
    assert current() == PLAIN
    quant_modules.deactivate()
    assert current() == PLAIN


def test_appended_entries_are_used() -> None:
    theirs = SimpleNamespace(Layer=nn.Linear)
    entry = quant_modules._quant_entry(theirs, "Layer", quant_nn.QuantLinear)
    quant_modules._DEFAULT_QUANT_MAP.append(entry)
    quant_modules.initialize()
    assert theirs.Layer is quant_nn.QuantLinear
    quant_modules.deactivate()
    assert theirs.Layer is PLAIN["Linear"]


def test_the_helper_undoes_it_after_an_exception() -> None:
    def build() -> None:
        with QuantModuleReplacementHelper():
            assert torch.nn.Conv2d is quant_nn.QuantConv2d
            raise KeyError("in the model's constructor")

    with pytest.raises(KeyError):
        build()
    assert current() == PLAIN
    helper = QuantModuleReplacementHelper()
    helper.prepare_state(REPLACED[1:])
    with helper:
        assert torch.nn.Conv1d is quant_nn.QuantConv1d
        assert torch.nn.Linear is PLAIN["Linear"]
    assert current() == PLAIN


def test_enable_onnx_export_is_a_context_that_gives_back() -> None:
    quantizer = quant_nn.TensorQuantizer
    assert not quantizer._enable_onnx_export
    with package.enable_onnx_export():
        assert quantizer._enable_onnx_export
        with quant_modules.enable_onnx_export():
            pass
        assert quantizer._enable_onnx_export
    with pytest.raises(KeyError), quant_modules.enable_onnx_export():
        raise KeyError
    assert not quantizer._enable_onnx_export
