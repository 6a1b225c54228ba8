"""The modules and names of pytorch-quantization 2.2.1; see :func:`torchq.compat.install`."""

from torchq.compat.pytorch_quantization import (
    calib,
    cuda_ext,
    nn,
    optim,
    quant_modules,
    tensor_quant,
    utils,
)
from torchq.compat.pytorch_quantization.quant_modules import (
    deactivate,
    enable_onnx_export,
    initialize,
)
from torchq.compat.pytorch_quantization.version import __version__

__all__ = [
    "__version__",
    "calib",
    "cuda_ext",
    "deactivate",
    "enable_onnx_export",
    "initialize",
    "nn",
    "optim",
    "quant_modules",
    "tensor_quant",
    "utils",
]
