"""The public names. A new one is entered here on purpose; one that disappears is a break."""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import FunctionType, ModuleType

import torchq

# What users type in most scripts; the rest is in packages.
TOP = """
__version__ adopt_ analysis calib calibrate deploy disabled doctor errors expected_codes
export_onnx forecast formats from_caffe from_mxnet from_onnx functional fuse_ inspect_onnx
layer_errors load load_model mixed_precision nn onnx patch plan ptq qat QuantConfig
QuantDescriptor quantize_ recipes report restore_ Rule runtimes save sensitivity summary
targets TensorQuantizer tune verify_dump verify_onnx workflow
"""


#: The decorator of each reader of files, for the operators of its own framework.
ALIKE = {"converter"}
MOST_KEYWORDS = 8


def public(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", []))


def packages() -> Iterator[ModuleType]:
    """Yield every module of the package but the kernels and shims that need another package."""
    skipped = ("__main__", "kernels.triton", "compat.shim")
    for actual in pkgutil.walk_packages(torchq.__path__, "torchq."):
        if not any(part in actual.name for part in skipped):
            yield importlib.import_module(actual.name)


def functions(name: str, value: object) -> Iterator[tuple[str, FunctionType]]:
    """Yield a function, or the methods of a class; what a dataclass holds is one value."""
    if isinstance(value, FunctionType):
        yield name, value
    elif isinstance(value, type) and value.__module__.startswith("torchq."):
        for key, method in vars(value).items():
            settings = key == "__init__" and dataclasses.is_dataclass(value)
            if isinstance(method, FunctionType) and not settings:
                yield f"{name}.{key}", method


def test_a_function_has_eight_keywords_at_most() -> None:
    """Count the arguments that can be given by name alone."""
    for module in packages():
        for entry in public(module):
            for name, function in functions(entry, getattr(module, entry)):
                given = inspect.signature(function).parameters.values()
                keywords = [p.name for p in given if p.kind is p.KEYWORD_ONLY]
                assert len(keywords) <= MOST_KEYWORDS, (
                    f"{module.__name__}.{name}: {keywords}"
                )


def test_a_public_name_means_one_thing() -> None:
    known: dict[str, tuple[object, str]] = {}
    # Foreign names.
    for module in (m for m in packages() if ".compat" not in m.__name__):
        for entry in set(public(module)) - ALIKE:
            value = getattr(module, entry)
            if isinstance(value, type | FunctionType):
                first, where = known.setdefault(entry, (value, module.__name__))
                assert first is value, f"{entry}: {where} and {module.__name__}"


def test_every_exported_name_exists_once_and_says_what_it_is() -> None:
    """Read every ``__all__`` of the package; Triton's kernels import only where Triton is."""
    for module in packages():
        assert len(set(public(module))) == len(public(module)), module.__name__
        for entry in public(module):
            value = getattr(module, entry)
            is_own = isinstance(value, type | FunctionType)
            assert not is_own or (value.__doc__ or "").strip(), entry


def test_the_top_level_shows_what_is_public_and_nothing_else() -> None:
    assert dir(torchq) == sorted(torchq.__all__) == sorted(TOP.split())
    assert len(public(torchq)) <= 46


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
        assert issubclass(error, base)
        assert issubclass(error, torchq.errors.TorchqError)


def test_version_is_a_version() -> None:
    assert all(part.isdigit() for part in torchq.__version__.split(".")[:2])
