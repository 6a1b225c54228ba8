"""The public names. A new one is entered here on purpose; one that disappears is a break."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import pytest

import torchq

# Other work adds to these packages; what is here must stay.
PROMISED: dict[str, str] = {
    "torchq": """
        __version__ analysis backends calib calibrate deploy disabled doctor errors
        export_onnx formats from_caffe from_mxnet from_onnx functional fuse_ inspect_onnx
        layer_errors load load_model mixed_precision nn onnx patch plan ptq qat
        QuantConfig QuantDescriptor quantize_ recipes report restore_ Rule save
        sensitivity summary targets TensorQuantizer tune verify_onnx workflow
    """,
    "torchq.analysis": """
        FrontPoint LayerChoice MixedPrecision Report compare mixed_precision report
        CHECKS DoctorReport Finding LayerError LayerErrors QuantizerRow SensitivityReport
        SensitivityRow doctor layer_errors sensitivity
    """,
    "torchq.errors": """
        TorchqError ConfigError CalibrationError QuantizationError FuseError ExportError
        FrontendError GraphError InputError MissingExtraError
    """,
    "torchq.engines": """
        Candidate ENGINES Engine EngineModule FastestReport GraphEngine OnnxRuntime OpenVino
        TorchEngine deploy register
    """,
    "torchq.formats": """
        CATALOG E2M1 E2M3 E3M2 E4M3 E5M2 E8M0 INT4 INT8 INT16 POWER_OF_TWO ROUNDINGS UINT4
        UINT8 FloatFormat Format Granularity IntFormat PerAxis PerBlock PerTensor by_bits
        by_name integer power_of_two_below round_number
    """,
    "torchq.functional": """
        AffineFakeQuantizeFunction FakeQuantizeFunction
        amax_from_scale compute_dtype dequantize fake_quantize fake_quantize_affine
        learned_fake_quantize quantize range_from_qparams reduce_amax reduce_range
        scale_and_zero_point scale_from_amax
    """,
    "torchq.recipes": """
        PLATFORMS Platform RECIPES by_name int8 int8_per_tensor integer platform
        w4a4 fp8 mxfp8 nvfp4
    """,
    "torchq.backends": """
        GEMMLOWP SINGLE_ROUNDING Backend Call FixedPoint fixed_point integer_average_pooling
        quantize_multiplier register_delegate register_handler shift_leaky_relu shift_right
    """,
    "torchq.calib": """
        CALIBRATORS ESTIMATORS Calibrator Histogram HistogramCalibrator MaxCalibrator
        make_calibrator methods sync
    """,
    "torchq.fusion": """
        FAMILIES BlockRule ConstantPad FuseReport Fusion
        Refusal RescalesOutput apply_fusion_record_ fuse_
        fusion_record register_block
    """,
    "torchq.nn": """
        QUANTIZED QuantAdaptiveAvgPool1d QuantAdaptiveAvgPool2d QuantAdaptiveAvgPool3d
        QuantAvgPool1d QuantAvgPool2d QuantAvgPool3d QuantConv1d QuantConv2d QuantConv3d
        QuantConvTranspose1d QuantConvTranspose2d QuantConvTranspose3d QuantEmbedding
        QuantIdentity QuantInstanceNorm1d QuantInstanceNorm2d QuantInstanceNorm3d
        QuantLinear QuantMaxPool1d QuantMaxPool2d QuantMaxPool3d QuantModule
        QuantTransformerEncoderLayer TensorQuantizer convert_ is_weight_quantizer register
        revert_
    """,
    "torchq.swap": """
        Decision Patch SwapReport decide patch plan quantize_ restore_ targets
    """,
    "torchq.qat": """
        Distillation Preparation
        Reestimate float_twin freeze_bn_
        freeze_bn_from_ freeze_ranges_from_ learn_ranges_ logit_loss observing param_groups
        prepare reestimate_bn_
        share_range_ unfreeze_bn_
    """,
    "torchq.workflow": """
        CalibrationReport LayerRow Summary SummaryRow apply_record_ calibrate
        calibrate_weights disabled freeze_ is_quantized load load_model quantizers save
        select_quantizers summary swap_record weight_quantizers
    """,
}


def public(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", []))


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_there(name: str) -> None:
    module = importlib.import_module(name)
    assert set(PROMISED[name].split()) <= set(public(module))


@pytest.mark.parametrize("name", PROMISED)
def test_exported_names_exist_once_and_say_what_they_are(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(public(module))) == len(public(module))
    for entry in public(module):
        value = getattr(module, entry)
        if callable(value):
            assert (value.__doc__ or "").strip(), f"{name}.{entry}"


def test_every_exported_name_exists() -> None:
    """Read every ``__all__`` of the package; Triton's kernels import only where Triton is."""
    skipped = ("__main__", "kernels.triton", "compat.shim")
    for found in pkgutil.walk_packages(torchq.__path__, "torchq."):
        if not any(part in found.name for part in skipped):
            module = importlib.import_module(found.name)
            missing = [entry for entry in public(module) if not hasattr(module, entry)]
            assert missing == [], found.name


def test_the_top_level_shows_what_is_public_and_nothing_else() -> None:
    assert dir(torchq) == sorted(torchq.__all__)


def test_the_top_level_stays_small() -> None:
    """What users type in most scripts; the rest is in packages."""
    assert len(public(torchq)) <= 42


def test_errors_are_what_python_users_expect() -> None:
    builtin = {
        "ConfigError": ValueError,
        "CalibrationError": RuntimeError,
        "QuantizationError": RuntimeError,
        "FuseError": RuntimeError,
    }
    builtin |= {"ExportError": RuntimeError, "MissingExtraError": ImportError}
    builtin |= {"InputError": TypeError}
    for name, base in builtin.items():
        error = getattr(torchq.errors, name)
        assert issubclass(error, base) and issubclass(error, torchq.errors.TorchqError)


def test_version_is_a_version() -> None:
    assert all(part.isdigit() for part in torchq.__version__.split(".")[:2])
