"""The public names. A new one is entered here on purpose; one that disappears is a break."""

from __future__ import annotations

import importlib
import pkgutil
from types import FunctionType, ModuleType

import torchq

# What users type in most scripts; the rest is in packages.
TOP = """
__version__ analysis backends calib calibrate deploy disabled doctor errors export_onnx formats
from_caffe from_mxnet from_onnx functional fuse_ inspect_onnx layer_errors load load_model
mixed_precision nn onnx patch plan ptq qat QuantConfig QuantDescriptor quantize_ recipes report
restore_ Rule save sensitivity summary targets TensorQuantizer tune verify_onnx workflow
"""


def public(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", []))


def test_every_exported_name_exists_once_and_says_what_it_is() -> None:
    """Read every ``__all__`` of the package; Triton's kernels import only where Triton is."""
    skipped = ("__main__", "kernels.triton", "compat.shim")
    for found in pkgutil.walk_packages(torchq.__path__, "torchq."):
        if not any(part in found.name for part in skipped):
            module = importlib.import_module(found.name)
            assert len(set(public(module))) == len(public(module)), found.name
            for entry in public(module):
                value = getattr(module, entry)
                is_own = isinstance(value, type | FunctionType)
                assert not is_own or (value.__doc__ or "").strip(), entry


def test_the_top_level_shows_what_is_public_and_nothing_else() -> None:
    assert dir(torchq) == sorted(torchq.__all__) == sorted(TOP.split())
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
