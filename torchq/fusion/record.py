"""What ``fuse_`` did to a model, kept with the model as data, and replayed on an unfused one.

The entries lie with the modules that they concern, so a part of a fused model has the record of
that part: each entry is an attribute of the deepest module that holds all the modules it names.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchq.errors import ConfigError, FuseError
from torchq.fusion.algebra import KernelBias
from torchq.fusion.blocks import BLOCKS, BlockEdit, BlockRule, MergedLayer
from torchq.fusion.fold import ConstantPad, FoldEdit, LayerNumbers
from torchq.fusion.linear_map import Geometry
from torchq.fusion.modules import is_layer, is_norm, output_channels
from torchq.utils import copy_module, short_repr, undone_on_error

#: No channel count, kernel size, stride or padding of a real layer is larger.
_LARGEST = 2**24
#: An entry may ask for a layer of this many times the weights of the branches that it replaces,
#: or of this many weights. What is larger is damaged.
_MOST_TIMES = 64
_MOST_WEIGHTS = 2**20

Entry = Mapping[str, Any]


#: The attribute that holds ``((order, entry with paths below the module), ...)``.
_ATTRIBUTE = "_torchq_fusions"


def fusion_record(model: nn.Module) -> list[dict[str, Any]]:
    """Return what ``fuse_`` did to ``model`` and its parts, as JSON data, in order.

    The record survives ``copy.deepcopy``, pickling, quantization and ``restore_``. It is not part
    of the state dict.

    Args:
        model: any module; left unchanged.

    Returns:
        One entry for each fusion: ``kind``, the paths of the modules, and the class and
        constructor arguments of new layers. Empty if nothing was fused.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
        >>> report = torchq.fuse_(model)
        >>> fusion_record(model)
        [{'kind': 'batchnorm', 'norms': ['1'], 'layers': ['0'], 'constant_pad': False}]
    """
    return [entry for _, entry in _ordered(model)]


def apply_fusion_record_(model: nn.Module, record: Sequence[Entry]) -> None:
    """Bring an unfused model into the structure of a fused one, in place.

    Afterwards the state dict of the fused model can be loaded. Until then new parameters are
    zero, and a changed layer keeps its own. Entries that ``model`` has in its own record already
    are skipped. The record may come from a file: nothing in it is executed, and every name and
    size is checked. A call that fails leaves the model as it was.

    Args:
        model: of the class that was fused.
        record: what :func:`fusion_record` returned.

    Raises:
        ConfigError: the record is damaged, or names a family that is not registered.
        FuseError: the model is not the one that was fused.

    Example:
        >>> from torch import nn
        >>> fused, fresh = (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)) for _ in "ab")
        >>> report = torchq.fuse_(fused.eval())
        >>> apply_fusion_record_(fresh, fusion_record(fused))
        >>> fresh.load_state_dict(fused.state_dict())
        <All keys matched successfully>
    """
    if not isinstance(record, (list, tuple)):
        raise _damaged(record, None, "a list of entries")
    for entry in record:
        if not isinstance(entry, Mapping) or "kind" not in entry:
            raise _damaged(entry, None, "an entry with 'kind'")
        if str(entry["kind"]) not in _CHANGES:
            raise _damaged(entry, "kind", f"one of {', '.join(sorted(_CHANGES))}")
    already_applied = {_canonical(entry) for entry in fusion_record(model)}
    entries = [
        dict(entry) for entry in record if _canonical(entry) not in already_applied
    ]
    with torch.inference_mode(False), undone_on_error(model), recording(model, entries):
        for entry in entries:
            _CHANGES[entry["kind"]](model, entry).apply(model)


def _canonical(entry: Entry) -> str:
    try:
        return json.dumps(entry, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise _damaged(entry, None, "JSON data") from None


@contextmanager
def recording(model: nn.Module, entries: Sequence[Entry]) -> Iterator[None]:
    """Add ``entries`` to the record of ``model`` once the body has carried them out."""
    old = _ordered(model)
    before = dict(model.named_modules(remove_duplicate=False))
    yield
    start = max((order for order, _ in old), default=-1) + 1
    new = [copy.deepcopy(dict(entry)) for entry in entries]
    _store(model, before, [*old, *enumerate(new, start)])


def _ordered(model: nn.Module) -> list[tuple[int, dict[str, object]]]:
    """Return order and entry of everything recorded below ``model``, with paths in ``model``."""
    recorded = [
        (order, _moved(entry, into=path))
        for path, module in model.named_modules()
        for order, entry in vars(module).get(_ATTRIBUTE, ())
    ]
    return sorted(recorded, key=lambda item: item[0])


def _store(
    model: nn.Module,
    before: Mapping[str, nn.Module],
    entries: Sequence[tuple[int, dict[str, object]]],
) -> None:
    """Write each entry to the deepest module that holds what it names and was not replaced."""
    modules = dict(model.named_modules(remove_duplicate=False))
    held: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for order, entry in entries:
        path = _common_parent(_paths(entry))
        while path and (path not in modules or modules[path] is not before.get(path)):
            path = path.rpartition(".")[0]
        held.setdefault(path, []).append((order, _moved(entry, out_of=path)))
    for module in modules.values():
        if _ATTRIBUTE in vars(module):
            delattr(module, _ATTRIBUTE)
    for path, entries_of_module in held.items():
        setattr(modules[path], _ATTRIBUTE, tuple(entries_of_module))


def _paths(entry: Entry) -> list[str]:
    return [entry["path"]] if "path" in entry else [*entry["norms"], *entry["layers"]]


def _moved(entry: Entry, out_of: str = "", into: str = "") -> dict[str, object]:
    """Return a copy of ``entry`` for the module at one of two paths, of which one is the root."""

    def change(path: str) -> str:
        return f"{into}.{path[len(out_of) :].lstrip('.')}".strip(".")

    new = copy.deepcopy(dict(entry))
    if "path" in new:
        return new | {"path": change(new["path"])}
    return new | {
        key: [change(path) for path in new[key]] for key in ("norms", "layers")
    }


def _common_parent(paths: Sequence[str]) -> str:
    """Return the path of the deepest module that holds the modules at all ``paths``."""
    parents = [path.split(".")[:-1] for path in paths]
    common: list[str] = []
    for names in zip(*parents, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


# -- checked reading: an entry may come from a file that anybody wrote -------------------------


def _damaged(record: object, key: str | None, expected: str) -> ConfigError:
    """Return the error for the value of ``key``, or with None for the whole entry."""
    got = record if key is None or not isinstance(record, Mapping) else record.get(key)
    where = "" if key is None else f" for {key!r}"
    return ConfigError(
        f"apply_fusion_record_: got {short_repr(got)}{where}; expected {expected}"
    )


def _misplaced(path: str, found: nn.Module | None, expected: str) -> FuseError:
    got = "no such module" if found is None else f"a {type(found).__name__}"
    return FuseError(
        f"apply_fusion_record_: {path or '(root)'}: got {got}; expected {expected}."
        " Build the model as it was before fuse_"
    )


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _is_texts(value: Any) -> bool:
    return (
        _is_list(value)
        and bool(value)
        and all(isinstance(entry, str) for entry in value)
    )


def _is_count(value: object, least: int = 1) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and least <= value <= _LARGEST
    )


def _counts(length: int, least: int) -> tuple[str, Callable[[Any], bool]]:
    def is_right(value: Any) -> bool:
        counts = _is_list(value) and all(_is_count(number, least) for number in value)
        return counts and len(value) == length

    return f"{length} whole numbers of at least {least}", is_right


_Field = tuple[str, Callable[[Any], bool]]
_TEXT: _Field = ("a string", lambda value: isinstance(value, str))
_COUNT: _Field = ("a positive whole number", _is_count)
_FOLD: dict[str, _Field] = {
    "kind": _TEXT,
    "norms": ("a list of strings", _is_texts),
    "layers": ("a list of strings", _is_texts),
    "constant_pad": ("true or false", lambda value: isinstance(value, bool)),
}
_BLOCK: dict[str, _Field] = {
    "kind": _TEXT,
    "path": _TEXT,
    "family": _TEXT,
    "layers": ("a list of layers", _is_list),
}
_LINEAR: dict[str, _Field] = {
    "class": _TEXT,
    "in_features": _COUNT,
    "out_features": _COUNT,
}


def _convolution(dims: int) -> dict[str, _Field]:
    counts = _counts(dims, 1)
    fields: dict[str, _Field] = {
        "class": _TEXT,
        "in_channels": _COUNT,
        "out_channels": _COUNT,
    }
    fields |= {"kernel_size": counts, "stride": counts, "padding": _counts(dims, 0)}
    return fields | {"groups": _COUNT}


def _checked(record: object, fields: Mapping[str, _Field]) -> list[Any]:
    """Return the values of an entry that has exactly these fields, without the first."""
    if not isinstance(record, Mapping) or set(record) != set(fields):
        raise _damaged(record, None, f"an entry with the keys {', '.join(fields)}")
    for key, (expected, is_right) in fields.items():
        if not is_right(record[key]):
            raise _damaged(record, key, expected)
    return [tuple(v) if _is_list(v) else v for v in map(record.__getitem__, fields)][1:]


def _fold_from(model: nn.Module, record: Entry) -> FoldEdit:
    """Return the fold that an entry describes, with the layers' own numbers."""
    norms, layers, padded = _checked(record, _FOLD)
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in norms:
        if not path or not is_norm(modules.get(path)):
            raise _misplaced(path, modules.get(path), "a BatchNorm")
    norm: Any = modules[norms[0]]
    numbers: dict[str, LayerNumbers] = {}
    for path in layers:
        layer: Any = modules.get(path)
        if not is_layer(layer):
            raise _misplaced(path, layer, "a layer")
        weight = layer.weight.detach()
        empty = weight.new_zeros(output_channels(layer))
        numbers[path] = LayerNumbers(
            weight, empty if layer.bias is None else layer.bias.detach()
        )
    if not padded:
        return FoldEdit(numbers, norms, None)
    if not isinstance(getattr(layer, "padding", None), tuple):
        raise _misplaced(path, layer, "a padded convolution")
    return FoldEdit(
        numbers, norms, ConstantPad(torch.zeros_like(norm.running_mean), layer.padding)
    )


def _block_from(model: nn.Module, record: Entry) -> BlockEdit:
    """Return the merge that an entry describes, with layers of zeros."""
    path, family, layers = _checked(record, _BLOCK)
    rule = BLOCKS[family]
    block = dict(model.named_modules(remove_duplicate=False)).get(path)
    if block is None or not rule.matches(block):
        raise _misplaced(path, block, f"a {rule.name} block with its branches")
    merged = tuple(_layer_from(layer, block) for layer in layers)
    layer_count = _layers_asked_for(block, rule, merged)
    if layer_count != len(merged):
        raise _damaged(
            record, "layers", f"{layer_count} layers for a {rule.name} block"
        )
    return BlockEdit(path, rule, merged)


def _layers_asked_for(
    block: nn.Module, rule: BlockRule, layers: tuple[MergedLayer, ...]
) -> int | None:
    """Return how many layers the conversion of ``block`` asks for; None if more than are given."""
    unused = iter(layers)
    try:
        rule.convert(
            copy_module(block), lambda *args, **kwargs: next(unused).like(block)
        )
    except StopIteration:
        return None
    return len(layers) - len(list(unused))


def _layer_from(record: object, block: nn.Module) -> MergedLayer:
    """Return a layer of zeros for ``block``, with the geometry that an entry describes."""
    geometry = _geometry_from(record)
    weights = sum(parameter.numel() for parameter in block.parameters())
    if geometry.kernel_numel > max(_MOST_WEIGHTS, _MOST_TIMES * weights):
        raise FuseError(
            f"apply_fusion_record_: got a layer of {geometry.kernel_numel} weights for a"
            f" {type(block).__name__} of {weights}. The record is damaged"
        )
    out = geometry.out_channels
    each = geometry.in_channels // geometry.groups
    value = KernelBias(torch.zeros(out, each, *geometry.window), torch.zeros(out))
    return MergedLayer.of(geometry, value, block)


def _geometry_from(record: object) -> Geometry:
    """Return the geometry that :meth:`MergedLayer.record` describes."""
    kind = record.get("class") if isinstance(record, Mapping) else None
    if kind == "Linear":
        channels, out = _checked(record, _LINEAR)
        return Geometry(channels, out, 1, (), (), (), ())
    dims = {f"Conv{n}d": n for n in (1, 2, 3)}.get(str(kind))
    if dims is None:
        raise _damaged(record, "class", "Linear, Conv1d, Conv2d or Conv3d")
    channels, out, window, stride, padding, groups = _checked(
        record, _convolution(dims)
    )
    if channels % groups or out % groups:
        raise _damaged(record, "groups", "a divisor of the channels")
    return Geometry(channels, out, groups, window, padding, padding, stride)


#: Kind of an entry -> function that checks it against a model and returns the change.
_CHANGES: dict[str, Callable[[nn.Module, Entry], FoldEdit | BlockEdit]] = {
    "batchnorm": _fold_from,
    "block": _block_from,
}
