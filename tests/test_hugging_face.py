"""What stands in ``config.json`` is checked, and a model is refused that it cannot describe."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import torchq
import torchq.hugging_face
from torchq.hugging_face.door import _Config, _Quantizer


@pytest.mark.parametrize(
    "tensors", [None, {"a": [[2], "complex"]}, {"a": ["x", "float32"]}, {"a": [[-1]]}]
)
def test_damaged_descriptions_are_refused(tensors: Any) -> None:
    quantizer = _Quantizer()
    quantizer.pre_quantized = True
    quantizer.quantization_config = _Config(tensors=tensors)
    model = nn.Sequential(nn.Linear(2, 2))
    message = (
        r"quantization_config: tensors.*expected \[shape, type\].*save the model again"
    )
    with pytest.raises(torchq.errors.ConfigError, match=message):
        quantizer._process_model_before_weight_loading(model)
    assert [name for name, _ in model.named_modules()] == ["", "0"]


def test_a_fused_model_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    images = torch.rand(2, 3, 4, 4)
    torchq.fuse_(model, images, progress=False)
    torchq.quantize_(model, target="onnxruntime", example=images, progress=False)
    with pytest.raises(
        torchq.errors.QuantizationError, match=r"is fused.*torchq\.save"
    ):
        _Quantizer().get_state_dict_and_metadata(model)


def test_a_float_model_is_refused() -> None:
    message = re.escape(
        "embed_: got a Linear; expected a quantized model of transformers"
    )
    with pytest.raises(torchq.errors.QuantizationError, match=message):
        torchq.hugging_face.embed_(nn.Linear(2, 2))
