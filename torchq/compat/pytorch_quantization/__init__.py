"""The modules and names of pytorch-quantization 2.2.1; see :func:`torchq.compat.install`."""

import sys
from types import ModuleType

from torchq.compat.pytorch_quantization import (
    calib,
    calibrators,
    clip,
    cuda_ext,
    layers,
    mixins,
    nn,
    optim,
    quant_logging,
    quant_modules,
    recurrent,
    recurrent_step,
    tensor_quant,
    tensor_quantizer,
    utils,
)
from torchq.compat.pytorch_quantization.quant_modules import (
    deactivate,
    enable_onnx_export,
    initialize,
)

__version__ = "2.2.1"

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

#: Path of a module of the original -> the module here that has its names; None has modules alone.
_PATHS = {
    "calib.calibrator": calibrators,
    "calib.histogram": calibrators,
    "calib.max": calibrators,
    "nn.functional": clip,
    "nn.modules": None,
    "nn.modules._utils": mixins,
    "nn.modules.clip": clip,
    "nn.modules.quant_conv": layers,
    "nn.modules.quant_instancenorm": layers,
    "nn.modules.quant_linear": layers,
    "nn.modules.quant_pooling": layers,
    "nn.modules.quant_rnn": recurrent,
    "nn.modules.tensor_quantizer": tensor_quantizer,
    "nn._functions": None,
    "nn._functions.quant_rnn": recurrent_step,
    "optim.helper": optim,
    "utils.quant_logging": quant_logging,
    "utils.reduce_amax": utils,
    "version": sys.modules[__name__],
}


def _register_paths() -> None:
    """Let ``import`` find each module under its path in the original, which pickles name too."""
    for path, module in _PATHS.items():
        parent, _, leaf = f"{__name__}.{path}".rpartition(".")
        leaf_module = module or ModuleType(
            f"{parent}.{leaf}", "Modules of pytorch-quantization."
        )
        sys.modules[f"{parent}.{leaf}"] = leaf_module
        if not hasattr(sys.modules[parent], leaf):  # utils.reduce_amax is the function
            setattr(sys.modules[parent], leaf, leaf_module)


_register_paths()
