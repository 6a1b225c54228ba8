"""Reading what torchq 0.2.0 stored: the record of version 2 becomes a stored plan."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchq.errors import ConfigError
from torchq.nn.modules.operators import OPERATORS, Call
from torchq.swap import schema
from torchq.utils import qualified_name

_PARTS = ("version", "fusions", "modules", "calls", "operators", "quantizers", "shared", "modes")
#: Where the class of calls with weights was.
_CALL = "torchq.nn.calls.routed.Call"


def upgraded(
    data: Mapping[str, Any], state: Mapping[str, Any] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Return what :meth:`Plan.to_dict` would give for a record of version 2.

    Some of these name only the first slot of a quantizer that stands in several. The ranges in
    ``state``, whose keys begin with ``prefix``, tell where it stands too.
    """
    record = schema.mapping(data, "record", required=_PARTS)
    rows: dict[str, dict[str, Any]] = {}
    for path, entry in schema.mapping(record["modules"], "modules").items():
        where = f"modules[{path!r}]"
        if not set(schema.mapping(entry, where)) <= {"class", "input", "weight", "output"}:
            raise schema.damaged(where, entry, "the entries class, input, weight, output")
        moved = {"class": qualified_name(Call)} if entry.get("class") == _CALL else {}
        rows[path] = {"names": [path], **entry, **moved}
    for path, entry in schema.mapping(record["calls"], "calls").items():
        where = f"calls[{path!r}]"
        schema.mapping(entry, where, required=("class", "sites"))
        row = rows.setdefault(path, {"names": [path], "class": entry["class"]})
        row["calls"] = entry["sites"]
    operators = {
        path: _operators(path, entry, rows)
        for path, entry in schema.mapping(record["operators"], "operators").items()
    }
    modes = schema.texts(record["modes"], "modes", schema.MODES)
    groups = [
        list(schema.paths(g, "shared", 2)) for g in schema.entries(record["shared"], "shared")
    ]
    _complete(groups, modes, state or {}, prefix)
    for group in groups:
        known = [modes[path] for path in group if path in modes]
        modes |= dict.fromkeys(group, known[0] if known else "quantize")
    return {
        "version": 3,
        "target": None,
        "recipe": "",
        "fusions": record["fusions"],
        "decisions": list(rows.values()),
        "operators": operators,
        "placed": record["quantizers"],
        "shared": groups,
        "modes": {path: mode for path, mode in modes.items() if mode != "quantize"},
        "work": None,
    }


def _operators(path: str, entry: Any, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the operators of one module, and put their ranges into the rows of the children."""
    where = f"operators[{path!r}]"
    schema.mapping(entry, where, required=("class", "nodes", "children"))
    kinds = schema.texts(entry["children"], f"{where}.children")
    sites = schema.children(entry["nodes"], f"{where}.nodes")
    if set(sites.values()) != set(kinds):
        raise schema.damaged(f"{where}.nodes", sorted(sites.values()), "every child once")
    for child, kind in kinds.items():
        name, colon, count = kind.partition(":")
        number = int(count) if count.isdecimal() and len(count) < 4 else 0
        if name not in OPERATORS or (colon and not (name == "Cat" and number > 1)):
            expected = f"one of {', '.join(sorted(OPERATORS))}, or Cat with a number of ranges"
            raise schema.damaged(f"{where}.children[{child!r}]", kind, expected)
        full = f"{path}.{child}" if path else child
        row = rows.get(full)
        if row is None or row["class"] != qualified_name(OPERATORS[name]):
            raise ConfigError(
                f"load: {where}.children[{child!r}]: got {kind} with the module "
                f"{row and row['class']}; expected both alike. The file is damaged"
            )
        row["ranges"] = number or 1
    return {"class": entry["class"], "sites": sites}


def _complete(
    groups: list[list[str]], modes: Mapping[str, str], state: Mapping[str, Any], prefix: str
) -> None:
    """Add slots that have the range of an earlier slot of the same module to its group."""
    named = {*modes, *(path for group in groups for path in group)}
    earlier: list[str] = []
    for key in [key for key in state if key.startswith(prefix) and key.endswith(".amax")]:
        path = key.removeprefix(prefix).removesuffix(".amax")
        parent = _parent(path)
        for first in earlier if path not in named else ():
            amax = state[f"{prefix}{first}.amax"]
            if _parent(first) == parent and _equal(amax, state[key]):
                group = next((group for group in groups if first in group), [first])
                groups += [group] if group not in groups else []
                group.append(path)
                named.add(path)
                break
        earlier += [path] if path in named else []
        is_slot = path.endswith("_quantizer") and parent in {_parent(p) for p in named}
        if is_slot and path not in named:
            raise ConfigError(
                f"load: {path}: is a quantizer of the tensors alone, with another range than those "
                "of its module; expected it in the record too. The file is damaged"
            )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _equal(one: Any, other: Any) -> bool:
    is_readable = isinstance(one, Tensor) and isinstance(other, Tensor) and not one.is_meta
    return is_readable and one.shape == other.shape and one.tolist() == other.tolist()
