"""torchq: quantize PyTorch models by swapping modules.

>>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
>>> report = torchq.quantize_(model, torchq.recipes.int8())
>>> report = torchq.calibrate(model, [torch.randn(8, 4)], progress=False)
>>> model(torch.randn(1, 4)).shape
torch.Size([1, 2])
"""

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


def __dir__() -> list[str]:
    """Return the public names; modules that are imported along the way are not among them."""
    return sorted(__all__)
