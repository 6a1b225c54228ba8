"""Names of a file as identifiers, and as paths of modules."""

from __future__ import annotations

import keyword
import re

from torch import nn

_DEEPEST = 32


def identifier(name: str, *, digits: bool = False) -> str:
    """Return ``name`` as a Python identifier: generated code contains nothing else of a file.

    Args:
        name: any text.
        digits: allow a plain number, as in paths of modules.
    """
    clean = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
    if clean.isdigit() and digits:
        return clean
    if clean[0].isdigit():
        clean = f"_{clean}"
    return f"{clean}_" if keyword.iskeyword(clean) or hasattr(nn.Module, clean) else clean


def free_path(root: nn.Module, name: str, op_type: str = "") -> str:
    """Return a path below ``root`` that nothing has taken.

    Args:
        root: its containers are plain :class:`torch.nn.Module` objects.
        name: of a node or tensor; dots and slashes separate the steps of the path.
        op_type: the operator, which exporters put behind the path of its module.
    """
    parts = [identifier(part, digits=True) for part in re.split(r"[./]+", name) if part]
    if op_type and len(parts) > 1 and re.fullmatch(rf"{op_type}(_\d+)?", parts[-1]):
        parts.pop()
    parts = parts[-_DEEPEST:] or ["node"]
    if _is_free(root, parts):
        return ".".join(parts)
    flat, count = "_".join(parts), 0
    if flat[0].isdigit():
        flat = f"_{flat}"
    candidate = flat
    while not _is_free(root, [candidate]):
        count += 1
        candidate = f"{flat}_{count}"
    return candidate


def _is_free(root: nn.Module, parts: list[str]) -> bool:
    """Return True if something may be put at a path: every step before it is a plain container."""
    parent = root
    for part in parts[:-1]:
        if not hasattr(parent, part):
            return True
        child = dict(parent.named_children()).get(part)
        if type(child) is not nn.Module:
            return False
        parent = child
    return not hasattr(parent, parts[-1])


def parent_of(root: nn.Module, path: str) -> nn.Module:
    """Return the module that the last step of a path belongs to; missing containers are made."""
    parent = root
    for part in path.split(".")[:-1]:
        if part not in dict(parent.named_children()):
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    return parent
