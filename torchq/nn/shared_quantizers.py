"""One quantizer for several tensors.

The same :class:`~torchq.nn.TensorQuantizer` object stands in several slots. Calibration
therefore sees all tensors, a learned range has one gradient, ``deepcopy`` and ``pickle`` keep the
sharing, and the state dict holds the range under every path: the tensor itself under the first
one, copies under the others.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import nn

from torchq.errors import ConfigError, QuantizationError
from torchq.formats import PerTensor
from torchq.functional import Range
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.utils import network_of


def share_quantizers_(model: nn.Module, paths: Sequence[str]) -> TensorQuantizer:
    """Put the first of several quantizers in the place of the others, in place, and return it.

    Args:
        model: The model that the paths start from.
        paths: Dotted paths of quantizers with equal descriptors, per tensor. The largest of their
            known ranges is used.

    Raises:
        QuantizationError: A path leads to no quantizer.
        ConfigError: The descriptors differ or are not per tensor.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> report = torchq.quantize_(model)
        >>> shared = share_quantizers_(model, ["0.input_quantizer", "1.input_quantizer"])
        >>> model[1].input_quantizer is model[0].input_quantizer is shared
        True
    """
    modules = dict(network_of(model).named_modules(remove_duplicate=False))
    chosen = [modules.get(path) for path in paths]
    for path, quantizer in zip(paths, chosen, strict=True):
        if not isinstance(quantizer, TensorQuantizer):
            raise QuantizationError(
                f"share: {path} is {type(quantizer).__name__}; expected the path of a quantizer"
            )
    quantizers = [q for q in chosen if isinstance(q, TensorQuantizer)]
    first = quantizers[0]
    if all(quantizer is first for quantizer in quantizers):
        return first
    for path, quantizer in zip(paths, quantizers, strict=True):
        if quantizer.descriptor.replace(name=None) != first.descriptor.replace(
            name=None
        ):
            raise ConfigError(
                f"share: {path} is {quantizer.descriptor}; expected {first.descriptor}, "
                f"as {paths[0]}"
            )
        if quantizer.descriptor.granularity != PerTensor():
            raise ConfigError(
                f"share: {path} is {quantizer.descriptor}; expected a range per tensor, "
                "tensors differ in their axes"
            )
    calibrated = [q for q in quantizers if q.calibrated and not q.amax.is_meta]
    if calibrated:
        widest = reduce(
            Range.joined, (q.range.map(torch.Tensor.detach) for q in calibrated)
        )
        pairs = zip(first.range.ends(), widest.ends(), strict=True)
        # To set a range computes its scale anew; a scale that was given by itself has to stay.
        if not all(torch.equal(end, wide) for (_, end), (_, wide) in pairs):
            first.range = widest
    first.shared = True
    for path in paths[1:]:
        parent, _, leaf = path.rpartition(".")
        setattr(modules[parent], leaf, first)
    return first


def shared_groups(model: nn.Module) -> list[list[str]]:
    """Return the paths of every quantizer that stands in several slots, of one module or more."""
    slots: dict[int, dict[tuple[int, str], str]] = {}
    owner = {"": id(model)}
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, leaf = path.rpartition(".")
        owner[path] = id(module)
        if isinstance(module, TensorQuantizer):
            # A module that stands in several places counts once, by its first path.
            slots.setdefault(id(module), {}).setdefault((owner[parent], leaf), path)
    groups = [list(paths.values()) for paths in slots.values()]
    return [paths for paths in groups if len(paths) > 1]
