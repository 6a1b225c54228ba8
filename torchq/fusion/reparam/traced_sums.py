"""Blocks of no known family: additions of linear branches that the trace of a module shows.

A module whose whole forward is one linear map is replaced by one layer. In any other module the
largest addition of linear branches is replaced by one layer inside a traced copy of its forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from torchq.errors import FuseError
from torchq.fusion import schema
from torchq.fusion.channel_ranges import spread_of
from torchq.fusion.linear_map.solve import TOLERANCE, apply_map, linear_map, relative_error
from torchq.fusion.linear_map.symbolic import Geometry, NotAffine
from torchq.fusion.modules import block_obstacle, is_fuse_leaf, is_layer, is_norm
from torchq.fusion.reparam.merged_layer import MergedLayer, geometry_of
from torchq.fusion.reparam.region import Region, find_region
from torchq.fusion.report import Fusion, Refusal
from torchq.graph import forward_hook_kind, trace_modules
from torchq.utils import copy_module, set_submodule

__all__ = ["AdditionEdit", "addition_from_record", "plan_unknown_blocks"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MERGED = "merged"
_MOST_LAYERS = 64  # larger modules that cannot be traced are not tried as one linear map


@dataclass(frozen=True)
class AdditionEdit:
    """A planned rewrite of one module: its addition of branches becomes one layer.

    Where there is nothing else in the module, the layer replaces it. Else an ``fx.GraphModule``
    of the same class name replaces it, with its other children and plain attributes.

    Attributes:
        path: where the module is.
        layer: the merged layer.
        whole: the layer replaces the module.
        fusion: the rewrite's row in the report; None where a record is replayed.
    """

    path: str
    layer: MergedLayer
    whole: bool
    fusion: Fusion | None = None

    def apply(self, model: nn.Module) -> None:
        """Rewrite the module at the path, and replace it wherever else it is registered too."""
        block = model.get_submodule(self.path)
        layer = self.layer.like(block).make()
        new = layer if self.whole else _rewritten(block, layer)
        named = model.named_modules(remove_duplicate=False)
        for name in [name for name, module in named if module is block]:
            set_submodule(model, name, new)

    def record(self) -> dict[str, Any]:
        """Return the structure of the change, as JSON data."""
        layer = self.layer.record()
        return {"kind": "addition", "path": self.path, "whole": self.whole, "layer": layer}


def addition_from_record(model: nn.Module, record: Mapping[str, Any]) -> AdditionEdit:
    """Return the rewrite that :meth:`AdditionEdit.record` describes, with a layer of zeros.

    Args:
        model: left unchanged. A module that is not replaced as a whole is traced.
        record: an entry of :func:`torchq.fusion.fusion_record`.

    Raises:
        ConfigError: the entry is damaged.
        FuseError: ``model`` has no such module, or adds up no such branches there.
    """
    schema.expect_keys(record, "kind", "path", "whole", "layer")
    path, whole = schema.text(record, "path"), schema.flag(record, "whole")
    block = dict(model.named_modules(remove_duplicate=False)).get(path)
    if block is None or not path or not any(map(is_layer, block.modules())):
        got = "no such module" if block is None else f"a {type(block).__name__}"
        raise _misplaced(path, got)
    layer = MergedLayer.from_record(record["layer"], block)
    if not whole:
        region = _traced_region(block)
        if region is None or not _fits(layer.geometry, region.value.geometry):
            raise _misplaced(path, f"a {type(block).__name__} without such an addition")
    return AdditionEdit(path, layer, whole)


def _fits(recorded: Geometry, traced: Geometry) -> bool:
    """Return True if both are of the same channels and stride."""
    if recorded.stride != traced.stride:
        return False
    channels = (recorded.in_channels, recorded.out_channels)
    return channels == (traced.in_channels, traced.out_channels)


def _misplaced(path: str, got: str) -> FuseError:
    return FuseError(
        f"apply_fusion_record_: {path or '(root)'}: got {got}; expected a module that adds up"
        " linear branches. Build the model as it was before fuse_"
    )


def _traced_region(block: nn.Module) -> Region | None:
    try:
        return find_region(trace_modules(block, is_fuse_leaf))
    except Exception:  # a module may fail to trace in any way it likes
        return None


def _rewritten(block: nn.Module, layer: nn.Module) -> nn.Module:
    """Return a traced copy of ``block`` that calls ``layer`` in place of its branches.

    Before: ``after(wide(x) - gate * slim(x))``. After: ``after(merged(x))``.
    """
    traced = trace_modules(block, is_fuse_leaf)
    region = find_region(traced)
    assert region is not None
    name = _MERGED
    while hasattr(block, name):
        name += "_"
    traced.add_submodule(name, layer)
    with traced.graph.inserting_after(region.result):
        call = traced.graph.call_module(name, (region.source,))
    region.result.replace_all_uses_with(call)
    traced.graph.eliminate_dead_code()
    nodes = list(traced.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    steps = [node.op for node in nodes]
    if placeholders == [region.source] and steps == ["placeholder", "call_module", "output"]:
        return layer
    traced.delete_all_unused_submodules()
    new = fx.GraphModule(traced, traced.graph, type(block).__name__)
    for key, value in vars(block).items():
        if not key.startswith("_") and not hasattr(new, key):
            setattr(new, key, value)
    return new.train(block.training)


def plan_unknown_blocks(
    model: nn.Module, modules: Iterable[tuple[str, nn.Module]] | None = None
) -> list[AdditionEdit | Refusal]:
    """Plan the rewrite of modules that add up linear branches in their own forward.

    Outermost modules that are one linear map as a whole come first, then innermost modules with
    an addition somewhere in their forward.

    Args:
        model: left unchanged.
        modules: the paths and modules to look at; default all of ``model``.
    """
    named = model.named_modules() if modules is None else modules
    looks = {path: _look(path, block) for path, block in named if _worth_a_look(block)}
    chosen: list[str] = []
    results: list[AdditionEdit | Refusal] = []
    for whole, paths in ((True, list(looks)), (False, list(reversed(looks)))):
        for path in paths:
            look = looks[path]
            if look is None or look.whole is not whole:
                continue
            if any(_nested(path, other) for other in chosen):
                continue
            chosen.append(path)
            if result := look.plan(path, model.get_submodule(path)):
                results.append(result)
    return results


def _nested(one: str, two: str) -> bool:
    """Return True if one path is the other or lies below it."""
    if one == two or not one or not two:
        return True
    return one.startswith(two + ".") or two.startswith(one + ".")


def _worth_a_look(block: nn.Module) -> bool:
    if is_fuse_leaf(block) or type(block) in _CONTAINERS:
        return False
    return sum(is_layer(m) or is_norm(m) for m in block.modules()) >= 2


@dataclass(frozen=True)
class _Look:
    """What the trace of a module showed.

    Attributes:
        region: the addition of branches; None where torch.fx cannot follow the forward.
    """

    region: Region | None

    @property
    def whole(self) -> bool:
        """True if the module is one linear map from its input to its output."""
        if self.region is None:
            return True
        users = [user.op for user in self.region.result.users]
        return self.region.source.op == "placeholder" and users == ["output"]

    def plan(self, path: str, block: nn.Module) -> AdditionEdit | Refusal | None:
        """Compute and check the merged layer."""
        if self.region is None:
            return _plan_whole(path, block)
        if not path:
            return Refusal(
                path,
                "sums linear branches in the model's own forward, which keeps its class;"
                " put them into a module of their own",
            )
        if isinstance(block, _CONTAINERS):
            return Refusal(
                path,
                f"sums linear branches in a {type(block).__name__}, whose items other code may"
                " read; put the branches into a module that is no container",
            )
        if reason := block_obstacle(block) or forward_hook_kind(block):
            return Refusal(path, f"sums linear branches; {reason}")
        symbol = self.region.value
        alone = self.region.extract(block)
        try:
            geometry, value, error = linear_map(
                alone, symbol.geometry.in_channels, symbol.geometry.spatial_dims
            )
        except NotAffine as reason:
            return Refusal(path, f"sums linear branches, but {reason}")
        parts = tuple(f"{path}.{name}" for name in self.region.called_modules())
        layer = MergedLayer.of(geometry, value, block)
        return _edit(path, block, layer, parts, error, whole=False)


def _look(path: str, block: nn.Module) -> _Look | None:
    try:
        traced = trace_modules(block, is_fuse_leaf)
    except fx.proxy.TraceError:
        return None  # its control flow depends on data
    except Exception:  # something that fx cannot follow, such as an assignment to a slice
        return _Look(None) if path and _only_linear(block) else None
    region = find_region(traced)
    return None if region is None else _Look(region)


def _edit(
    path: str,
    block: nn.Module,
    layer: MergedLayer,
    parts: tuple[str, ...],
    error: float,
    *,
    whole: bool,
) -> AdditionEdit:
    before = max((spread_of(m, m.weight) for m in block.modules() if is_layer(m)), default=None)
    after = spread_of(nn.Identity(), layer.value.kernel)
    found_by = "gradients" if whole else "fx"
    fusion = Fusion(path, "unknown block", parts, error, found_by, None, before, after)
    return AdditionEdit(path, layer, whole, fusion)


def _only_linear(block: nn.Module) -> bool:
    """Return True if ``block`` is small, and nothing in it is known not to be linear."""
    leaves = [module for module in block.modules() if next(module.children(), None) is None]
    known = (nn.Identity, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.ZeroPad2d)
    of_torch = [m for m in leaves if type(m).__module__.startswith("torch.nn.")]
    if not all(is_layer(m) or is_norm(m) or isinstance(m, known) for m in of_torch):
        return False
    return len(leaves) <= _MOST_LAYERS and any(map(is_layer, leaves))


def _plan_whole(path: str, block: nn.Module) -> AdditionEdit | None:
    """Plan one layer for a module that cannot be traced but holds only linear layers."""
    layers = [module for module in block.modules() if is_layer(module)]
    hint = geometry_of(layers[0])
    if hint is None or hint.spatial_dims == 0 or isinstance(block, _CONTAINERS):
        return None
    if block_obstacle(block) or forward_hook_kind(block):
        return None
    probe = copy_module(block).cpu().double()
    try:
        geometry, value, error = linear_map(
            probe.forward, hint.in_channels, hint.spatial_dims, hint
        )
    except NotAffine:
        return None
    if geometry.kernel_numel > sum(layer.weight.numel() for layer in layers):
        return None
    # A branch for large values only would look linear at the scale of linear_map's own check.
    spatial = [w + 7 for w in geometry.window]
    x = torch.randn(3, geometry.in_channels, *spatial, dtype=torch.float64, device="cpu") * 100
    if not relative_error(apply_map(x, geometry, value), probe.forward(x).detach()) <= TOLERANCE:
        return None
    parts = tuple(f"{path}.{name}" for name, _ in block.named_children())
    return _edit(path, block, MergedLayer.of(geometry, value, block), parts, error, whole=True)
