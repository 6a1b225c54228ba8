"""What was quantized in a model and how, as JSON data with a schema.

A record may come from a file of an unknown author. It is checked as a whole before a model is
touched, nothing in it is executed, and applying it changes all of a model or nothing.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError
from torchq.fusion import apply_fusion_record_, fusion_record
from torchq.nn import QuantModule, convert_, revert_, share_quantizers_, shared_groups
from torchq.nn.calls.functions import CallSite
from torchq.nn.calls.routed import RoutedModule, route_calls_
from torchq.nn.convert import unchanged_on_error
from torchq.nn.modules.operators import OPERATORS, operator_named
from torchq.nn.operator_modules import (
    OperatorOwner,
    add_recorded_children_,
    replace_recorded_operators_,
)
from torchq.nn.subclasses import unparametrized
from torchq.swap.apply import name_quantizers
from torchq.utils import modules_with_names, qualified_name, set_submodule, twin_of
from torchq.workflow.modes import quantizers

_VERSION = 2
_MODES = frozenset(["off", "observe", "quantize", "observe+quantize"])
_SLOTS = ("input", "weight", "output")


def swap_record(model: nn.Module) -> dict[str, Any]:
    """Return what was quantized in ``model`` and how, as JSON data.

    The dictionary has these entries:

    ============  ============================================================================
    version       The version of this schema, 2.
    fusions       What :func:`torchq.fuse_` did; see :func:`torchq.fusion.fusion_record`.
    modules       Path -> the float class of a quantized module, and the descriptors of its
                  ``input``, ``weight`` and ``output``.
    calls         Path of a module -> its class and the sites of the quantized function calls
                  in its forward; see :class:`torchq.nn.calls.functions.CallSite`.
    operators     Path of a module -> its class, the operators of its forward that children
                  stand for (``nodes``), and the float classes of these children.
    quantizers    Path -> the descriptor of a quantizer that the author of the model placed.
    shared        Lists of the paths of one quantizer.
    modes         Path of every quantizer -> its mode.
    ============  ============================================================================

    Args:
        model: any module; left unchanged.

    Returns:
        The dictionary.
    """
    modules, operators, calls = {}, {}, {}
    owned: set[int] = set()
    for names, module in modules_with_names(model):
        if isinstance(module, QuantModule):
            owned |= {id(child) for child in module.children()}
        if isinstance(module, RoutedModule):
            sites = [site.to_dict() for site in module.calls]
            calls[names[0]] = {"class": qualified_name(type(module).float_class), "sites": sites}
        if isinstance(module, OperatorOwner) and module.replacements:
            operators[names[0]] = module.replacement_record()
        if isinstance(module, QuantModule) and not (
            isinstance(module, OperatorOwner) and module.is_container
        ):
            descriptors = {
                slot: descriptor.to_dict() for slot, descriptor in module.rule_descriptors().items()
            }
            modules[names[0]] = {"class": qualified_name(type(module).float_class), **descriptors}
    known = {_public_path(path): q for path, q in quantizers(model).items()}
    return {
        "version": _VERSION,
        "fusions": fusion_record(model),
        "modules": modules,
        "calls": calls,
        "operators": operators,
        "quantizers": {
            n: q.given_descriptor.to_dict() for n, q in known.items() if id(q) not in owned
        },
        "shared": [[_public_path(path) for path in paths] for paths in shared_groups(model)],
        "modes": {name: q.mode for name, q in known.items()},
    }


def apply_record_(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Fuse and quantize ``model`` as ``record`` says, in place.

    A model that is quantized in another way is made float first, so that afterwards it is
    quantized as the record says and in no other way. A call that fails changes nothing.

    Args:
        model: the architecture that the record was made from, float or quantized.
        record: what :func:`swap_record` returned.

    Raises:
        ConfigError: The record is damaged, or of another version.
        QuantizationError: The model is not the one that the record was made from.
        FuseError: The model cannot be fused as the record says.
    """
    checked = _Record.read(record)
    with unchanged_on_error(model):
        if _without_modes(swap_record(model)) != _without_modes(record):
            _revert_all(model)
            _fuse(model, checked)
            _replace_operators(model, checked)
            _route_calls(model, checked)
            _convert_modules(model, checked)
            for paths in checked.shared:
                share_quantizers_(model, paths)
        _check_placed_quantizers(model, checked)
        _set_modes(model, checked)
        name_quantizers(model)


def with_all_shared(
    record: Mapping[str, Any], state: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return a record that names every slot of a shared quantizer, as some of torchq 0.2.0 do not.

    They name the first slot of each module alone. The ranges tell where the quantizer stands too.
    """
    checked = _Record.read(record)
    groups = [list(group) for group in checked.shared]
    named = {*checked.modes, *(path for group in groups for path in group)}
    earlier: list[str] = []
    for key in [key for key in state if key.startswith(prefix) and key.endswith(".amax")]:
        path = key.removeprefix(prefix).removesuffix(".amax")
        parent = path.rpartition(".")[0]
        for first in earlier if path not in named else ():
            amax = state[f"{prefix}{first}.amax"]
            if first.rpartition(".")[0] == parent and _equal(amax, state[key]):
                group = next((group for group in groups if first in group), [first])
                groups += [group] if group not in groups else []
                group.append(path)
                named.add(path)
                break
        earlier += [path] if path in named else []
    return {**record, "shared": groups}


def _equal(one: Any, other: Any) -> bool:
    is_readable = isinstance(one, Tensor) and isinstance(other, Tensor) and not one.is_meta
    return is_readable and one.shape == other.shape and one.tolist() == other.tolist()


def _public_path(path: str) -> str:
    """Return the path of a quantizer without the leading underscore of legacy layers.

    So a record of legacy layers fits torchq's own layers, and the other way round.
    """
    parent, dot, leaf = path.rpartition(".")
    is_legacy = leaf.startswith("_") and leaf.endswith("_quantizer")
    return f"{parent}{dot}{leaf[1:]}" if is_legacy else path


def public_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``model`` with the keys of torchq's own layers for legacy layers.

    A legacy quantizer without a range gets the empty range that an own quantizer has.
    """
    state = model.state_dict()
    for path, quantizer in quantizers(model).items():
        public = _public_path(path)
        if public == path:
            continue
        ranges = {"amax": quantizer.amax, "pre_quant_scale": quantizer.pre_quant_scale}
        for name, tensor in ranges.items():
            state.pop(f"{path}._{name}", None)
            if tensor is not None:
                state[f"{public}.{name}"] = tensor.detach()
        state.setdefault(f"{public}.amax", torch.empty(0, device="cpu"))
    return state


def _without_modes(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("modes", "version")}


def _revert_all(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, QuantModule):
            revert_(module)


def _fuse(model: nn.Module, record: _Record) -> None:
    apply_fusion_record_(model, record.fusions)
    if len(fusion_record(model)) != len(record.fusions):
        raise QuantizationError(
            f"load: {qualified_name(type(model))}: is fused; expected an unfused model, as the one "
            "that was saved is not fused in this way. Build the model again"
        )


def _replace_operators(model: nn.Module, record: _Record) -> None:
    found = dict(model.named_modules())
    for path, entry in record.operators.items():
        module = _find(found, path, entry["class"])
        for child in entry["children"]:
            if hasattr(module, child):
                raise QuantizationError(
                    f"{path or '(root)'}: has an attribute {child} already; expected a module "
                    "without it. Load into the architecture that was saved"
                )
        replace = add_recorded_children_ if path in record.calls else replace_recorded_operators_
        replace(module, entry)


def _route_calls(model: nn.Module, record: _Record) -> None:
    """Route the calls of modules with several calls, which adds children with quantizers."""
    found = dict(model.named_modules())
    for path, (cls, sites) in record.calls.items():
        if path not in record.modules:
            operators = record.operators.get(path, {}).get("nodes")
            route_calls_(_find(found, path, cls), sites, operators=operators)


def _convert_modules(model: nn.Module, record: _Record) -> None:
    found = dict(model.named_modules(remove_duplicate=False))
    modules = {path: _find(found, path, entry.cls) for path, entry in record.modules.items()}
    places: dict[int, set[tuple[int, str]]] = {}
    for path, module in found.items():
        parent, _, leaf = path.rpartition(".")
        places.setdefault(id(module), set()).add((id(found[parent]), leaf))
    for path, module in modules.items():
        descriptors = record.modules[path].descriptors
        has_state = bool((*module.parameters(), *module.buffers(), *module.children()))
        if len(places[id(module)]) > 1 and not has_state:
            # One object without parameters in several places: each place got a copy.
            set_submodule(model, path, convert_(twin_of(module), **descriptors))
        else:
            _, sites = record.calls.get(path, ("", ()))
            if sites and "output" in descriptors:
                raise _damaged(f"modules[{path!r}]", "output", "none for function calls")
            if sites:
                operators = record.operators.get(path, {}).get("nodes")
                route_calls_(module, sites, operators=operators, **descriptors)
            else:
                convert_(module, **descriptors)


def _find(found: Mapping[str, nn.Module], path: str, expected: str) -> nn.Module:
    module = found.get(path)
    got = "no such module" if module is None else qualified_name(unparametrized(type(module)))
    if module is None or got != expected:
        raise QuantizationError(
            f"{path or '(root)'}: got {got}; expected {expected}. Load into the architecture that "
            "was saved"
        )
    return module


def _check_placed_quantizers(model: nn.Module, record: _Record) -> None:
    quantized = [module for module in model.modules() if isinstance(module, QuantModule)]
    owned = {id(child) for module in quantized for child in module.children()}
    for path, quantizer in quantizers(model).items():
        expected = record.quantizers.get(path)
        if id(quantizer) not in owned and quantizer.given_descriptor != expected:
            raise QuantizationError(
                f"{path}: quantizes as {quantizer.given_descriptor}; "
                f"expected {expected or 'none here'}. Load into the architecture that was saved"
            )


def _set_modes(model: nn.Module, record: _Record) -> None:
    known = {_public_path(path): q for path, q in quantizers(model).items()}
    different = sorted(set(known) ^ set(record.modes))
    if different:
        raise QuantizationError(
            f"{different[0]}: is a quantizer of the model or of the record, not of both; expected "
            "the same quantizers. Load into the architecture that was saved"
        )
    for path, quantizer in known.items():
        quantizer.mode = record.modes[path]


@dataclass(frozen=True)
class _Layer:
    """A quantized module: its float class, and descriptors by slot."""

    cls: str
    descriptors: Mapping[str, QuantDescriptor]


@dataclass(frozen=True)
class _Record:
    """A record whose every part was checked; see :func:`swap_record`."""

    fusions: Sequence[Mapping[str, Any]]
    modules: Mapping[str, _Layer]
    calls: Mapping[str, tuple[str, tuple[CallSite, ...]]]
    operators: Mapping[str, Mapping[str, Any]]
    quantizers: Mapping[str, QuantDescriptor]
    shared: Sequence[Sequence[str]]
    modes: Mapping[str, str]

    @classmethod
    def read(cls, data: Any) -> _Record:
        """Check ``data`` and return what it says."""
        version = data.get("version") if isinstance(data, Mapping) else None
        if isinstance(version, int) and version != _VERSION:
            raise ConfigError(f"load: got a record of version {version}; expected {_VERSION}")
        record = _mapping(
            data, "record", required=("version", *(field.name for field in fields(cls)))
        )
        if type(version) is not int:
            raise _damaged("version", version, str(_VERSION))
        if not isinstance(record["fusions"], list):
            raise _damaged("fusions", record["fusions"], "a list")
        parts: dict[str, Any] = {
            part: {
                path: read(entry, f"{part}[{path!r}]")
                for path, entry in _mapping(record[part], part).items()
            }
            for part, read in _READERS.items()
        }
        shared, modes = _read_groups(record["shared"]), _texts(record["modes"], "modes", _MODES)
        return cls(record["fusions"], **parts, shared=shared, modes=modes)


def _damaged(where: str, got: Any, expected: str) -> ConfigError:
    text = repr(got)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return ConfigError(f"load: {where}: got {shown}; expected {expected}. The file is damaged")


def _mapping(value: Any, where: str, required: Sequence[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _damaged(where, value, "a dictionary with names as keys")
    if required is not None and set(value) != set(required):
        raise _damaged(where, sorted(value), f"the entries {', '.join(required)}")
    return value


def _texts(value: Any, where: str, allowed: frozenset[str] | None = None) -> dict[str, str]:
    for key, text in _mapping(value, where).items():
        if not isinstance(text, str) or (allowed is not None and text not in allowed):
            expected = "a string" if allowed is None else f"one of {', '.join(sorted(allowed))}"
            raise _damaged(f"{where}[{key!r}]", text, expected)
    return dict(value)


def _read_layer(value: Any, where: str) -> _Layer:
    entry = _mapping(value, where)
    if not isinstance(entry.get("class"), str) or not set(entry) <= {"class", *_SLOTS}:
        raise _damaged(where, entry, "the entries class, input, weight, output")
    descriptors = {
        slot: _read_descriptor(entry[slot], f"{where}.{slot}") for slot in _SLOTS if slot in entry
    }
    return _Layer(entry["class"], descriptors)


def _read_descriptor(value: Any, where: str) -> QuantDescriptor:
    try:
        return QuantDescriptor.from_dict(_mapping(value, where))
    except ConfigError as error:
        raise ConfigError(f"load: {where}: {error}") from None


def _read_calls(value: Any, where: str) -> tuple[str, tuple[CallSite, ...]]:
    entry = _mapping(value, where, required=("class", "sites"))
    if not isinstance(entry["class"], str) or not isinstance(entry["sites"], list):
        raise _damaged(where, entry, "the name of a class and a list of sites")
    try:
        sites = [CallSite.from_dict(_mapping(site, f"{where}.sites")) for site in entry["sites"]]
    except ConfigError as error:
        raise ConfigError(f"load: {where}: {error}. The file is damaged") from None
    return entry["class"], tuple(sites)


def _read_operators(value: Any, where: str) -> dict[str, Any]:
    entry = _mapping(value, where, required=("class", "nodes", "children"))
    if not isinstance(entry["class"], str):
        raise _damaged(f"{where}.class", entry["class"], "the name of a class")
    nodes = _texts(entry["nodes"], f"{where}.nodes")
    children = _texts(entry["children"], f"{where}.children")
    for child, kind in children.items():
        if operator_named(kind) is None:
            expected = f"one of {', '.join(sorted(OPERATORS))}, or Cat with a number of ranges"
            raise _damaged(f"{where}.children[{child!r}]", kind, expected)
        # The names become attributes in generated code.
        if not (child.isidentifier() and child.isascii()) or keyword.iskeyword(child):
            raise _damaged(f"{where}.children", child, "names that are Python identifiers")
    if set(nodes.values()) != set(children):
        raise _damaged(f"{where}.nodes", sorted(nodes.values()), "every child once")
    return {"class": entry["class"], "nodes": nodes, "children": children}


def _read_groups(value: Any) -> list[list[str]]:
    is_valid = isinstance(value, list) and all(
        isinstance(group, list) and len(group) > 1 and all(isinstance(p, str) for p in group)
        for group in value
    )
    if not is_valid:
        raise _damaged("shared", value, "lists of two or more paths")
    return value


#: Part of a record -> what checks and reads the entry of one path.
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "modules": _read_layer,
    "calls": _read_calls,
    "operators": _read_operators,
    "quantizers": _read_descriptor,
}
