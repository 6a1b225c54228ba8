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

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path

from torchq.compat import absl_logging, pytorch_quantization
from torchq.errors import QuantizationError

__all__ = ["SHIM", "install", "pytorch_quantization", "uninstall"]

_OLD = "pytorch_quantization"
_NEW = pytorch_quantization.__name__
#: A folder for module search paths; it has the old module, and its name and version as a package.
SHIM = str(Path(__file__).resolve().parent / "shim")


class _OldDistribution(importlib.abc.MetaPathFinder):
    """Finds the name and version of the old package, which libraries ask importlib.metadata for.

    It finds no module: those are in :data:`sys.modules`.
    """

    def find_spec(self, *_: object) -> None:
        """Return nothing."""

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Return the distribution where it is asked for, or for all."""
        name = None if context is None else context.name
        if SHIM in sys.path:  # There it is found already.
            return []
        return MetadataPathFinder.find_distributions(
            DistributionFinder.Context(name=name, path=[SHIM])
        )


def _aliases() -> dict[str, str]:
    """Return a dictionary from old names to ours, for the package and every module in it."""
    return {
        _OLD + name.removeprefix(_NEW): name
        for name in list(sys.modules)
        if name == _NEW or name.startswith(_NEW + ".")
    }


def install() -> None:
    """Make ``import pytorch_quantization`` give :mod:`torchq.compat.pytorch_quantization`.

    The same holds for every module in the package, and ``importlib.metadata`` finds a distribution
    of that name. A second call does nothing. If ``absl``, which
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
    if not any(isinstance(finder, _OldDistribution) for finder in sys.meta_path):
        sys.meta_path.append(_OldDistribution())
    if "absl" not in sys.modules and importlib.util.find_spec("absl") is None:
        sys.modules.update(absl_logging.stand_in())


def uninstall() -> None:
    """Undo :func:`install`; objects that were imported stay usable."""
    for old, new in _aliases().items():
        if sys.modules.get(old) is sys.modules[new]:
            del sys.modules[old]
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _OldDistribution)]
    for name in absl_logging.stand_in():
        if getattr(sys.modules.get(name), "STANDS_FOR", None) == absl_logging.__name__:
            del sys.modules[name]
