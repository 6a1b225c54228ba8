"""Planning the merge of known blocks: each is converted on a copy and compared as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import FuseError
from torchq.fusion import schema
from torchq.fusion.linear_map.solve import TOLERANCE, Function, linear_map, relative_error
from torchq.fusion.linear_map.symbolic import NotAffine
from torchq.fusion.modules import block_obstacle, is_layer, is_norm, spatial_dims_of
from torchq.fusion.reparam.merged_layer import MergedLayer, geometry_of
from torchq.fusion.reparam.rule import BLOCKS, BlockRule, attributes_like, rule_of
from torchq.fusion.report import Fusion, Refusal
from torchq.utils import copy_module, set_submodule

__all__ = ["BlockEdit", "block_from_record", "find_blocks", "plan_blocks"]


@dataclass(frozen=True)
class BlockEdit:
    """A planned merge of one block, applicable to the model and to copies of it.

    Attributes:
        path: where the block is.
        rule: the block's family.
        layers: the merged layers, in the order in which the rule asks for them.
        fusion: the merge's row in the report; None where a record is replayed.
    """

    path: str
    rule: BlockRule
    layers: tuple[MergedLayer, ...]
    fusion: Fusion | None = None

    def apply(self, model: nn.Module) -> None:
        """Convert the block at the path, and replace it wherever else it is registered too."""
        block = model.get_submodule(self.path)
        named = model.named_modules(remove_duplicate=False)
        names = [name for name, module in named if module is block]
        layers = iter(self.layers)
        new = self.rule.convert(block, lambda *args, **kwargs: next(layers).like(block))
        if new is not None:
            for name in names:
                set_submodule(model, name, new)

    def record(self) -> dict[str, Any]:
        """Return the structure of the change, as JSON data."""
        layers = [layer.record() for layer in self.layers]
        return {"kind": "block", "path": self.path, "family": self.rule.name, "layers": layers}


def block_from_record(model: nn.Module, record: Mapping[str, Any]) -> BlockEdit:
    """Return the merge that :meth:`BlockEdit.record` describes, with layers of zeros.

    Args:
        model: left unchanged.
        record: an entry of :func:`torchq.fusion.fusion_record`.

    Raises:
        ConfigError: the entry is damaged, or its family is not registered.
        FuseError: ``model`` has no such block.
    """
    schema.expect_keys(record, "kind", "path", "family", "layers")
    path, rule = schema.text(record, "path"), BLOCKS[schema.text(record, "family")]
    block = dict(model.named_modules(remove_duplicate=False)).get(path)
    if block is None or not rule.matches(block):
        got = "no such module" if block is None else f"a {type(block).__name__}"
        raise FuseError(
            f"apply_fusion_record_: {path or '(root)'}: got {got}; expected a {rule.name} block"
            " with its branches. Build the model as it was before fuse_"
        )
    layers = record["layers"]
    if not isinstance(layers, (list, tuple)):
        raise schema.damaged(record, "layers", "a list of layers")
    merged = tuple(MergedLayer.from_record(layer, block) for layer in layers)
    asked = _layers_asked_for(block, rule, merged)
    if asked != len(merged):
        raise schema.damaged(record, "layers", f"{asked} layers for a {rule.name} block")
    return BlockEdit(path, rule, merged)


def _layers_asked_for(
    block: nn.Module, rule: BlockRule, layers: tuple[MergedLayer, ...]
) -> int | None:
    """Return how many layers the conversion of ``block`` asks for; None if more than are given."""
    count = 0

    def merge(*args: Any, **kwargs: Any) -> MergedLayer:
        nonlocal count
        count += 1
        return layers[count - 1].like(block)

    try:
        rule.convert(copy_module(block), merge)
    except IndexError:
        return None
    return count


def find_blocks(model: nn.Module) -> list[tuple[str, BlockRule]]:
    """Return path and rule of each block that still has its branches, judged by names alone.

    Args:
        model: left unchanged; nothing is computed.

    Returns:
        Outermost blocks, in the order of ``model.named_modules()``.

    Example:
        >>> find_blocks(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)))
        []
    """
    found: list[tuple[str, BlockRule]] = []
    for path, block in model.named_modules():
        if any(path.startswith(outer + ".") for outer, _ in found):
            continue
        rule = rule_of(block)
        if rule is not None:
            found.append((path, rule))
    return found


def plan_blocks(modules: Iterable[tuple[str, nn.Module]]) -> list[BlockEdit | Refusal]:
    """Plan the merge of every known block among ``modules``, outermost first."""
    results: list[BlockEdit | Refusal] = []
    inside: tuple[str, ...] = ()
    for path, block in modules:
        if inside and path.startswith(inside):
            continue
        result = _plan_block(path, block)
        if result is not None:
            results.append(result)
            inside += (path + "." if path else "",)
    return results


def _plan_block(path: str, block: nn.Module) -> BlockEdit | Refusal | None:
    refusal = None
    for name in reversed(list(BLOCKS)):
        rule = BLOCKS[name]
        if not rule.matches(block) or (rule.writes is None and not path):
            continue
        if rule.loose and _has_silent_norm(block):
            continue
        if reason := block_obstacle(block):
            return Refusal(path, f"is a {name} block; {reason}")
        try:
            return _convert_copy(path, block, rule)
        except NotAffine as reason:
            if not rule.loose:
                refusal = Refusal(path, f"looks like a {name} block; {reason}")
    return refusal


def _has_silent_norm(block: nn.Module) -> bool:
    """Return True if a norm multiplies all channels by zero, as residual blocks often begin.

    Such a block computes less than it will after training: that it looks linear proves nothing.
    """
    weights = [m.weight for m in block.modules() if is_norm(m)]
    return any(weight is not None and not weight.detach().any() for weight in weights)


def _convert_copy(path: str, block: nn.Module, rule: BlockRule) -> BlockEdit:
    """Convert a float64 copy of ``block`` and compare it with the block.

    Raises:
        NotAffine: the linear part is no linear map, or the converted block computes something else.
    """
    probe = copy_module(block).cpu().double()
    reference = copy_module(probe)
    layers: list[MergedLayer] = []
    errors: list[float] = []

    def merge(
        function: Function,
        main: Any = None,
        *,
        in_channels: int | None = None,
    ) -> MergedLayer:
        hint = geometry_of(main) if is_layer(main) else None
        if in_channels is None:
            in_channels = main.running_mean.numel() if hint is None else hint.in_channels
        dims = 2 if main is None else spatial_dims_of(main)
        geometry, value, error = linear_map(function, in_channels, dims, hint)
        errors.append(error)
        layers.append(MergedLayer.of(geometry, value, block))
        return layers[-1].like(probe)

    new = rule.convert(probe, merge)
    errors.append(_block_error(reference, new or probe, layers[0]))
    if not errors[-1] <= TOLERANCE:
        raise NotAffine(
            f"merging would be off by {errors[-1]:.1e} (relative, float64);"
            f" expected at most {TOLERANCE:.0e}"
        )
    fusion = _row(path, block, rule, max(errors))
    return BlockEdit(path, rule, tuple(layers), fusion)


def _row(path: str, block: nn.Module, rule: BlockRule, error: float) -> Fusion:
    present = [n for n in attributes_like(block, rule.branches) if getattr(block, n) is not None]
    parts = tuple(f"{path}.{name}".lstrip(".") for name in present)
    name = path if rule.writes is None else f"{path}.{rule.writes}".lstrip(".")
    return Fusion(name, rule.name, parts, error, "names")


def _block_error(before: nn.Module, after: nn.Module, layer: MergedLayer) -> float:
    """Return the relative error of the whole block, activation included, on two input sizes.

    A block that needs more than one tensor gives 0: its layers were compared one by one.

    Raises:
        NotAffine: the forward needs the branches that were merged.
    """
    generator, error = torch.Generator().manual_seed(0), 0.0
    geometry = layer.geometry
    for extra in (2, 5):
        spatial = [w + extra + axis for axis, w in enumerate(geometry.window)]
        shape = (2, geometry.in_channels, *spatial)
        x = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
        with torch.no_grad():
            try:
                want = before.forward(x)
            except Exception:  # the forward expects a list of feature maps or further arguments
                return error
            if not isinstance(want, Tensor):
                return error
            try:
                found = after.forward(x)
            except Exception as reason:  # as another block with parts of these names raises it
                raise NotAffine(f"its forward fails without its branches ({reason})") from reason
            error = max(error, relative_error(found, want))
    return error
