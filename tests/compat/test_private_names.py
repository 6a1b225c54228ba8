"""Private names of the original that published scripts import, call or derive from."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.compat.pytorch_quantization import calib, tensor_quant
from torchq.compat.pytorch_quantization import calibrators as histogram
from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization.nn.modules import _utils, quant_conv
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor

# Channels, kernel, stride, padding, dilation.
SIZES = (
    3,
    4,
    (3, 3),
    (1, 1),
    (0, 0),
    (1, 1),
)


class OwnConv(quant_conv._QuantConvNd):
    """A convolution of a script: the constructor of the original, a forward of its own."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL

    def __init__(self, **kwargs: Any) -> None:
        given = _utils.pop_quant_desc_in_kwargs(type(self), **kwargs)
        named = dict(zip(("quant_desc_input", "quant_desc_weight"), given, strict=True))
        super().__init__(*SIZES, False, (0, 0), 1, True, "zeros", **named)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self._quant(x)
        return F.conv2d(x, weight, self.bias)


class OwnConvTranspose(quant_conv._QuantConvTransposeNd):
    """The same for a transposed convolution, with descriptors by position."""

    def __init__(self) -> None:
        given = QuantDescriptor(num_bits=8), QuantDescriptor(num_bits=8, axis=1)
        super().__init__(*SIZES, True, (0, 0), 1, True, "zeros", *given)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self._quant(x)
        return F.conv_transpose2d(x, weight, self.bias)


@pytest.mark.parametrize(
    ("own", "builtin", "base"),
    [
        (OwnConv, quant_nn.QuantConv2d, quant_conv._QuantConvNd),
        (
            OwnConvTranspose,
            quant_nn.QuantConvTranspose2d,
            quant_conv._QuantConvTransposeNd,
        ),
    ],
)
def test_convolution_bases_can_be_derived_from(
    own: Any, builtin: Any, base: type
) -> None:
    torch.manual_seed(0)
    mine = own()
    theirs = builtin(3, 4, 3)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(mine(x), theirs(x))
    assert isinstance(theirs, base)
    assert isinstance(mine, base)
    assert isinstance(mine, torch.nn.modules.conv._ConvNd)
    assert not (isinstance(theirs, quant_conv._QuantConvNd) and theirs.transposed)


def test_the_range_of_a_max_calibrator_is_assignable() -> None:
    calibrator = calib.MaxCalibrator(8, None, False)
    calibrator.collect(torch.tensor([5.0]))
    calibrator._calib_amax = torch.tensor(2.0)
    assert calibrator.compute_amax() == torch.tensor(2.0)
    calibrator.collect(torch.tensor([1.0, -3.0]))
    assert calibrator._calib_amax == torch.tensor(3.0)
    calibrator._calib_amax = None
    assert calibrator.compute_amax() is None
    channels = calib.MaxCalibrator(8, 0, False)
    channels._calib_amax = torch.tensor([[1.0], [2.0]])
    channels.collect(torch.tensor([[3.0, 0.0], [0.5, -1.0]]))
    assert torch.equal(
        channels.compute_amax(),
        torch.tensor([[3.0], [2.0]]),
    )


def test_functions_behind_histogram_calibrators() -> None:
    calibrator = calib.HistogramCalibrator(8, None, False, num_bins=512)
    calibrator.collect(torch.randn(5000, generator=torch.Generator().manual_seed(1)))
    counts = calibrator._calib_hist
    edges = calibrator._calib_bin_edges
    assert counts is not None
    assert edges is not None
    actual = {
        "entropy": histogram._compute_amax_entropy(
            counts.numpy(), edges.numpy(), 8, False
        ),
        "mse": histogram._compute_amax_mse(counts, edges, 8, False, 1, 128),
        "percentile": histogram._compute_amax_percentile(
            counts.numpy(), edges.numpy(), 99.0
        ),
    }
    for method, amax in actual.items():
        options = {"percentile": 99.0} if method == "percentile" else {}
        assert isinstance(amax, Tensor)
        assert torch.equal(amax, calibrator.compute_amax(method, **options))
    assert np.asarray(actual["mse"]).shape == ()


def test_codes_and_scale_without_rounding_the_scale() -> None:
    x = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float16)
    codes, scale = tensor_quant._tensor_quant(x, torch.tensor(1.0))
    assert codes.dtype is torch.float16
    assert codes.tolist() == [127.0, -64.0, 32.0]
    assert scale.dtype is torch.float32
    assert scale.item() == 127.0
    assert tensor_quant._tensor_quant(x, torch.tensor(1e-6))[1].item() > 65504.0


def test_readiness_for_export() -> None:
    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(amax=1.0))
    quantizer._check_onnx_readiness(torch.ones(2))
    quantizer.enable_calib()
    with pytest.warns(UserWarning, match="got calibration enabled during an export"):
        quantizer._check_onnx_readiness(torch.ones(2))
