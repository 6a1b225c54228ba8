"""The tensors of a model's output that count: its results, and the scores of its classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torchq.graph import tensors_in

__all__ = ["class_axis", "only_scores", "results_in", "scores_in"]

#: What Transformers ("logits", "logits_per_image") and torchvision ("out") call scores of classes.
_NAMES = ("logits", "out")


def results_in(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output.

    A number among tensors is left out: it is the loss of a model that was given labels.
    """
    found = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    return [tensor for tensor in found if tensor.dim()] or found


def scores_in(output: Any) -> list[Tensor]:
    """Return the scores of classes in an output.

    Where a field has the name that other libraries use for scores, it is the only one: encoders
    and caches return further tensors, which have no classes. Else all results with two dimensions
    and two classes or more count.
    """
    named = _named(output)
    return [t for t in named or results_in(output) if _has_classes(t)]


def only_scores(output: Any) -> Tensor | None:
    """Return the scores where it is plain which tensor holds them: by its name, or alone."""
    found = _named(output) or results_in(output)
    return found[0] if len(found) == 1 and _has_classes(found[0]) else None


def _named(output: Any) -> list[Tensor]:
    fields = [value for name, value in _fields(output) if name.split("_")[0] in _NAMES]
    return results_in(fields[0]) if fields else []


def _has_classes(tensor: Tensor) -> bool:
    return tensor.dim() >= 2 and tensor.shape[class_axis(tensor)] > 1


def _fields(output: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(output, Mapping):
        yield from ((str(name), value) for name, value in output.items())
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output)]
        yield from ((name, getattr(output, name)) for name in names)


def class_axis(output: Tensor) -> int:
    """Return the axis of the classes: 1 for images (N, C, H, W), else the last."""
    return 1 if output.dim() >= 4 else -1
