"""torchq: quantize PyTorch models by swapping modules.

>>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
>>> report = torchq.quantize_(model, torchq.recipes.int8())
>>> report = torchq.calibrate(model, [torch.randn(8, 4)], progress=False)
>>> model(torch.randn(1, 4)).shape
torch.Size([1, 2])

``import torchq`` loads neither torch nor a package of torchq: each public name loads its own at
its first use, as PEP 562 has it.
"""

import difflib
import importlib
import importlib.util
from typing import Any

from torchq.version import __version__

__all__ = [
    "QuantConfig",
    "QuantDescriptor",
    "Rule",
    "TensorQuantizer",
    "__version__",
    "adopt_",
    "analysis",
    "calib",
    "calibrate",
    "deploy",
    "disabled",
    "doctor",
    "errors",
    "expected_codes",
    "export_onnx",
    "forecast",
    "formats",
    "from_caffe",
    "from_mxnet",
    "from_onnx",
    "functional",
    "fuse_",
    "inspect_onnx",
    "layer_errors",
    "load",
    "load_model",
    "mixed_precision",
    "nn",
    "onnx",
    "patch",
    "plan",
    "ptq",
    "qat",
    "quantize_",
    "recipes",
    "report",
    "restore_",
    "runtimes",
    "save",
    "sensitivity",
    "summary",
    "targets",
    "tune",
    "verify_dump",
    "verify_onnx",
    "workflow",
]

#: Public name -> the module that it is read from. A name that is not here is a module of torchq.
#: __init__.pyi says the same to type checkers; tests/test_first_use.py compares them.
_SOURCES = {
    "doctor": "torchq.analysis",
    "forecast": "torchq.analysis",
    "layer_errors": "torchq.analysis",
    "mixed_precision": "torchq.analysis",
    "report": "torchq.analysis",
    "sensitivity": "torchq.analysis",
    "QuantConfig": "torchq.config",
    "Rule": "torchq.config",
    "QuantDescriptor": "torchq.descriptor",
    "adopt_": "torchq.frontends",
    "from_caffe": "torchq.frontends",
    "from_mxnet": "torchq.frontends",
    "from_onnx": "torchq.frontends",
    "fuse_": "torchq.fusion",
    "TensorQuantizer": "torchq.nn",
    "expected_codes": "torchq.onnx",
    "export_onnx": "torchq.onnx",
    "verify_dump": "torchq.onnx",
    "verify_onnx": "torchq.onnx",
    "tune": "torchq.ptq",
    "targets": "torchq.runtime",
    "deploy": "torchq.runtimes",
    "inspect_onnx": "torchq.runtimes",
    "patch": "torchq.swap",
    "plan": "torchq.swap",
    "quantize_": "torchq.swap",
    "restore_": "torchq.swap",
    "calibrate": "torchq.workflow",
    "disabled": "torchq.workflow",
    "load": "torchq.workflow",
    "load_model": "torchq.workflow",
    "save": "torchq.workflow",
    "summary": "torchq.workflow",
}


def __getattr__(name: str) -> Any:
    """Load a public name, or a module of torchq, at its first use."""
    if name in _SOURCES:
        value = getattr(importlib.import_module(_SOURCES[name]), name)
        globals()[name] = value
        return value
    if _is_module(name):
        return importlib.import_module(f"torchq.{name}")
    nearest = difflib.get_close_matches(name, __all__, n=1)
    suggestion = f"; did you mean torchq.{nearest[0]}?" if nearest else ""
    raise AttributeError(f"module 'torchq' has no attribute {name!r}{suggestion}")


def _is_module(name: str) -> bool:
    """Return True for a module of torchq; private names are looked for by tools, and are none."""
    if name.startswith("_") or not name.isidentifier():
        return False
    return importlib.util.find_spec(f"torchq.{name}") is not None


def __dir__() -> list[str]:
    """Return the public names; modules that are imported along the way are not among them."""
    return sorted(__all__)
