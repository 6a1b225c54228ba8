"""Saving a quantized model as data: what was swapped, how, and the tensors."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError
from torchq.nn import (
    QuantModule,
    RewrittenForward,
    convert_,
    replace_recorded_operators_,
    share_quantizers_,
    shared_groups,
)
from torchq.swap.apply import name_quantizers
from torchq.utils import modules_with_names, qualified_name, set_submodule, twin_of
from torchq.workflow.modes import quantizers

__all__ = ["save", "load", "swap_record", "apply_record"]

_VERSION = 1


def swap_record(model: nn.Module) -> dict[str, Any]:
    """What was swapped in ``model`` and how, as JSON data."""
    modules, wirings = {}, {}
    for names, module in modules_with_names(model):
        if isinstance(module, RewrittenForward):
            wirings[names[0]] = module.replacement_record()
        elif isinstance(module, QuantModule):
            descriptors = {
                name: descriptor.to_dict() for name, descriptor in module.rule_descriptors().items()
            }
            modules[names[0]] = {"class": qualified_name(type(module).float_class), **descriptors}
    modes = {name: q.mode for name, q in quantizers(model).items()}
    return {
        "version": _VERSION,
        "wirings": wirings,
        "modules": modules,
        "shared": shared_groups(model),
        "modes": modes,
    }


def apply_record(model: nn.Module, record: dict[str, Any]) -> None:
    """Swap the modules of a float ``model`` as ``record`` says; modules that are quantized already are left.

    Raises:
        ConfigError: an unknown version.
        QuantizationError: the model has no module of that name and class.
    """
    if record.get("version") != _VERSION:
        raise ConfigError(
            f"load: got a record of version {record.get('version')!r}; expected {_VERSION}"
        )
    _rewire(model, record.get("wirings", {}))
    found = dict(model.named_modules(remove_duplicate=False))
    listed = [id(found[name]) for name in record["modules"] if name in found]
    todo, places = [], []
    for name, entry in record["modules"].items():
        module = found.get(name)
        cls = type(module).float_class if isinstance(module, QuantModule) else type(module)
        if module is None or qualified_name(cls) != entry["class"]:
            got = "no such module" if module is None else qualified_name(cls)
            raise QuantizationError(
                f"{name or '(root)'}: got {got}; expected {entry['class']}. Load into the architecture that was saved"
            )
        if not isinstance(module, QuantModule):
            if (
                listed.count(id(module)) > 1
            ):  # one object without parameters that got a copy in each of its places
                module = twin_of(module)
                places.append((name, module))
            todo.append(
                (
                    module,
                    {
                        slot: QuantDescriptor.from_dict(entry[slot])
                        for slot in ("input", "weight")
                        if slot in entry
                    },
                )
            )
    for module, descriptors in todo:
        convert_(module, **descriptors)
    for name, module in places:
        set_submodule(model, name, module)
    for paths in record.get("shared", []):
        share_quantizers_(model, paths)
    known = quantizers(model)
    for name, mode in record["modes"].items():
        if name in known:
            known[name].mode = mode
    name_quantizers(model)


def _rewire(model: nn.Module, wirings: dict[str, Any]) -> None:
    """Put the recorded operators of modules back in place."""
    found = dict(model.named_modules())
    for name, entry in wirings.items():
        if name not in found:
            raise QuantizationError(
                f"{name}: got no such module; expected {entry['class']}. Load into the architecture that was saved"
            )
        if not isinstance(found[name], RewrittenForward):
            replace_recorded_operators_(found[name], entry)


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the swaps, descriptors and tensors of ``model`` to one file that loads with ``weights_only=True``.

    Unlike ``torch.save(model)`` no class is pickled: :func:`load` needs a freshly built float model.
    """
    torch.save({"torchq": swap_record(model), "state_dict": model.state_dict()}, path)


def load(model: nn.Module, path: str | os.PathLike[str], *, map_location: Any = "cpu") -> nn.Module:
    """Make ``model`` what was saved: swap its layers, in place, and load all tensors strictly.

    Args:
        model: the architecture that was saved, float or quantized.
        path: what :func:`save` wrote.
        map_location: as for :func:`torch.load`; tensors end on the model's own device.

    Raises:
        QuantizationError: the architecture differs.
        ConfigError: the file was not written by :func:`save`.
    """
    data = torch.load(path, map_location=map_location, weights_only=True)
    if not isinstance(data, dict) or "torchq" not in data:
        raise ConfigError(
            f"load: {os.fspath(path)} was not written by torchq.save; expected its 'torchq' entry. Use load_state_dict for a state dict"
        )
    apply_record(model, data["torchq"])
    model.load_state_dict(data["state_dict"], strict=True)
    return model
