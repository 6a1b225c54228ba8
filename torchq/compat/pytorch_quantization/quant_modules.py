"""Replacement of classes in ``torch.nn`` by quantized ones, for models that are built afterwards.

As in the original, names are patched for the whole process until :func:`deactivate`.
:func:`torchq.patch` does the same without patching ``torch.nn``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchq.compat.pytorch_quantization import nn as quant_nn

_quant_entry = namedtuple("_quant_entry", "orig_mod mod_name replace_mod")

#: What :func:`initialize` replaces; scripts read it, and append to it.
_DEFAULT_QUANT_MAP = [
    _quant_entry(torch.nn, name, getattr(quant_nn, f"Quant{name}"))
    for name in (
        *(f"Conv{d}d" for d in (1, 2, 3)),
        *(f"ConvTranspose{d}d" for d in (1, 2, 3)),
        *("Linear", "LSTM", "LSTMCell"),
        *(f"AvgPool{d}d" for d in (1, 2, 3)),
        *(f"AdaptiveAvgPool{d}d" for d in (1, 2, 3)),
    )
]


class QuantModuleReplacementHelper:
    """A replacement that can be undone.

    It is also a context manager, which undoes the replacement after an exception too.

    Attributes:
        default_quant_map: the list of default entries.
        quant_map: the entries that :meth:`apply_quant_modules` sets, in order.
        orginal_func_map: the entries with the classes from before (the original's spelling).
    """

    def __init__(self) -> None:
        self.default_quant_map = _DEFAULT_QUANT_MAP
        self.quant_map: list[Any] = []
        self.orginal_func_map: list[Any] = []

    def prepare_state(
        self,
        float_module_list: Sequence[str] | None = None,
        custom_map: Iterable[tuple[object, str, type]] | None = None,
    ) -> None:
        """Add the default entries but some names, and further ones, which take precedence."""
        excluded = float_module_list or ()
        entries = [
            entry for entry in self.default_quant_map if entry.mod_name not in excluded
        ]
        entries += [_quant_entry(*entry) for entry in custom_map or ()]
        replaced = {
            (id(entry.orig_mod), entry.mod_name) for entry in self.orginal_func_map
        }
        for entry in entries:
            key = id(entry.orig_mod), entry.mod_name
            # What a second call finds there is quantized already.
            if key not in replaced:
                replaced.add(key)
                before = getattr(entry.orig_mod, entry.mod_name)
                self.orginal_func_map.append(entry._replace(replace_mod=before))
        self.quant_map += entries

    def apply_quant_modules(self) -> None:
        """Replace all entries."""
        for entry in self.quant_map:
            setattr(entry.orig_mod, entry.mod_name, entry.replace_mod)

    def restore_float_modules(self) -> None:
        """Restore the classes from before."""
        for entry in self.orginal_func_map:
            setattr(entry.orig_mod, entry.mod_name, entry.replace_mod)
        self.quant_map, self.orginal_func_map = [], []

    def __enter__(self) -> QuantModuleReplacementHelper:
        if not self.quant_map:
            self.prepare_state()
        self.apply_quant_modules()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore_float_modules()


_quant_module_helper_object = QuantModuleReplacementHelper()


def initialize(
    float_module_list: Sequence[str] | None = None,
    custom_quant_modules: Iterable[tuple[object, str, type]] | None = None,
) -> None:
    """Replace ``torch.nn.Conv2d``, ``Linear``, ... by quantized classes in the whole process.

    Names such as ``["Linear"]`` stay, unless ``(module, name, class)`` of the second list has them.
    """
    _quant_module_helper_object.prepare_state(float_module_list, custom_quant_modules)
    _quant_module_helper_object.apply_quant_modules()


def deactivate() -> None:
    """Undo every :func:`initialize`; models that were built stay quantized."""
    _quant_module_helper_object.restore_float_modules()


@contextmanager
def enable_onnx_export() -> Iterator[None]:
    """Make an unknown range an error while the context lasts, around ``torch.onnx.export``."""
    before = quant_nn.TensorQuantizer._enable_onnx_export
    quant_nn.TensorQuantizer._enable_onnx_export = True
    try:
        yield
    finally:
        quant_nn.TensorQuantizer._enable_onnx_export = before
