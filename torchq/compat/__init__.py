"""pytorch-quantization's names on torchq: its scripts and checkpoints work unchanged.

>>> import torchq.compat
>>> torchq.compat.install()
>>> from pytorch_quantization import nn as quant_nn
>>> quant_nn.QuantLinear(2, 2).input_quantizer.num_bits
8
>>> torchq.compat.uninstall()

``python -m torchq.compat script.py args`` does the same without a change in the script. Nothing
else in torchq imports this package.
"""

import importlib.util
import sys

from torchq.compat import absl_logging, pytorch_quantization
from torchq.errors import QuantizationError

__all__ = ["install", "pytorch_quantization", "uninstall"]

_OLD = "pytorch_quantization"
_NEW = pytorch_quantization.__name__


def _aliases() -> dict[str, str]:
    """Return a dictionary from old names to ours, for the package and every module in it."""
    return {
        _OLD + name.removeprefix(_NEW): name
        for name in list(sys.modules)
        if name == _NEW or name.startswith(_NEW + ".")
    }


def install() -> None:
    """Make ``import pytorch_quantization`` give :mod:`torchq.compat.pytorch_quantization`.

    The same holds for every module in the package. A second call does nothing. If ``absl``, which
    the original required, is not installed, ``from absl import logging`` gives a stand-in that
    has its verbosity and its messages.

    Raises:
        QuantizationError: another ``pytorch_quantization`` is imported already.
    """
    present = sys.modules.get(_OLD)
    if present is not None and present is not pytorch_quantization:
        where = getattr(present, "__file__", None)
        # The module that stands for this package on a search path is just being imported.
        if getattr(present, "STANDS_FOR", None) != _NEW:
            raise QuantizationError(
                f"install: pytorch_quantization is imported already, from {where}. "
                "Call install() before its first import"
            )
    for old, new in _aliases().items():
        sys.modules[old] = sys.modules[new]
    if "absl" not in sys.modules and importlib.util.find_spec("absl") is None:
        sys.modules.update(absl_logging.stand_in())


def uninstall() -> None:
    """Undo :func:`install`; objects that were imported stay usable."""
    for old, new in _aliases().items():
        if sys.modules.get(old) is sys.modules[new]:
            del sys.modules[old]
    for name in absl_logging.stand_in():
        if getattr(sys.modules.get(name), "STANDS_FOR", None) == absl_logging.__name__:
            del sys.modules[name]
