# What type checkers and editors see of the names that __init__.py loads at their first use.

from torchq import (
    analysis,
    calib,
    errors,
    formats,
    functional,
    nn,
    onnx,
    ptq,
    qat,
    recipes,
    runtimes,
    workflow,
)
from torchq.analysis import (
    doctor,
    forecast,
    layer_errors,
    mixed_precision,
    report,
    sensitivity,
)
from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.frontends import adopt_, from_caffe, from_mxnet, from_onnx
from torchq.fusion import fuse_
from torchq.nn import TensorQuantizer
from torchq.onnx import expected_codes, export_onnx, verify_dump, verify_onnx
from torchq.ptq import tune
from torchq.runtime import targets
from torchq.runtimes import deploy, inspect_onnx
from torchq.swap import patch, plan, quantize_, restore_
from torchq.version import __version__
from torchq.workflow import calibrate, disabled, load, load_model, save, summary

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
