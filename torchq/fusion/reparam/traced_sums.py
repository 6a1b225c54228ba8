"""Blocks of unknown make: sums of linear branches found in the trace of a module, and modules that are one linear map as a whole."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from torchq.fusion.channel_ranges import spread_of
from torchq.fusion.linear_map.solve import TOLERANCE, apply_map, linear_map, relative_error
from torchq.fusion.linear_map.symbolic import NotAffine
from torchq.fusion.linear_map.symbolic_ops import AffineTensor
from torchq.fusion.modules import block_obstacle, is_fuse_leaf, is_layer, is_norm
from torchq.fusion.reparam.merged_layer import MergedLayer, geometry_of, rank_of
from torchq.fusion.report import Fusion, Refusal
from torchq.graph import forward_hook_kind, trace
from torchq.utils import set_submodule

__all__ = ["plan_unknown_blocks"]

_MERGED = "merged"
_MOST_LAYERS = 64  # untraceable modules larger than this are not tried as one linear map


class _Unknown:
    """Stands for a value whose channels nothing tells; no rule applies to it."""


class _Values(fx.Interpreter):
    """Runs a trace on :class:`AffineTensor` values. Where an operation is not linear, its result is a new source."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        inputs = [self.values.get(source) for source in n.all_input_nodes]
        if n.op == "output":
            return None
        if n.op == "placeholder" or any(isinstance(value, _Unknown) for value in inputs):
            result = self._source(n)
        else:
            try:
                result = super().run_node(n)
            except Exception:  # not linear, or the forward of a module asked for more than is known
                result = self._source(n)
        self.values[n] = result
        return result

    def _source(self, node: fx.Node) -> Any:
        for user in node.users:
            module = self.fetch_attr(str(user.target)) if user.op == "call_module" else None
            if is_layer(module) and not isinstance(module, nn.Linear) and user.args[:1] == (node,):
                return AffineTensor.identity(
                    node, module.in_channels, rank_of(module), module.weight.device
                )
            if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
                device = None if module.running_mean is None else module.running_mean.device
                return AffineTensor.identity(node, module.num_features, rank_of(module), device)
        return _Unknown()


@dataclass(frozen=True)
class _Region:
    """A sum of linear branches: everything between ``source`` and ``result``."""

    source: fx.Node
    result: fx.Node
    inner: frozenset[fx.Node]
    value: AffineTensor


def _find_region(traced: fx.GraphModule) -> _Region | None:
    """The largest sum of linear branches in a trace that is worth one layer; later results first."""
    values = _Values(traced)
    values.run(*[None for node in traced.graph.nodes if node.op == "placeholder"])
    for node in reversed(traced.graph.nodes):
        value = values.values.get(node)
        if (
            not isinstance(value, AffineTensor)
            or not isinstance(value.source, fx.Node)
            or value.joins == 0
            or value.layers < 2
        ):
            continue
        if value.geometry.kernel_numel > value.cost:
            continue  # one layer would do more work than the branches
        inner = _between(value.source, node, values.values)
        if all(user in inner for each in inner if each is not node for user in each.users):
            return _Region(value.source, node, inner, value)
    return None


def _between(source: fx.Node, result: fx.Node, values: dict[fx.Node, Any]) -> frozenset[fx.Node]:
    found, todo = {result}, [result]
    while todo:
        for node in todo.pop().all_input_nodes:
            if (
                node is not source
                and node not in found
                and isinstance(values.get(node), AffineTensor)
            ):
                found.add(node)
                todo.append(node)
    return frozenset(found)


def _alone(block: nn.Module, region: _Region) -> fx.GraphModule:
    """A module that computes just the region, in float64 on the CPU, on a copy of the block."""
    graph = fx.Graph()
    copies = {region.source: graph.placeholder("x")}
    needed, todo = {region.result}, [region.result]
    while todo:  # the branches, and what is computed from parameters alone
        new = [
            node
            for node in todo.pop().all_input_nodes
            if node is not region.source and node not in needed
        ]
        needed.update(new)
        todo += new
    for node in region.source.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[region.result])
    return fx.GraphModule(copy.deepcopy(block).cpu().double(), graph)


@dataclass(frozen=True)
class GenericEdit:
    """A planned rewrite of one module: its sum of branches becomes one layer.

    The module's place is taken by that layer where there is nothing else in it, else by an ``fx.GraphModule`` of the same class name
    with its other children and plain attributes.
    """

    path: str
    layer: MergedLayer
    whole: bool
    fusion: Fusion

    def apply(self, model: nn.Module) -> None:
        """Rewrite the module at the path, wherever else it is registered too."""
        block = model.get_submodule(self.path)
        layer = self.layer.like(block).make()
        new = layer if self.whole else _rewritten(block, layer)
        for name in [
            name for name, module in model.named_modules(remove_duplicate=False) if module is block
        ]:
            set_submodule(model, name, new)


def _rewritten(block: nn.Module, layer: nn.Module) -> nn.Module:
    traced = trace(block, is_fuse_leaf)
    region = _find_region(traced)
    assert region is not None
    name = _MERGED
    while hasattr(block, name):
        name += "_"
    traced.add_submodule(name, layer)
    with traced.graph.inserting_after(region.result):
        call = traced.graph.call_module(name, (region.source,))
    region.result.replace_all_uses_with(call)
    traced.graph.eliminate_dead_code()
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    if placeholders == [region.source] and [node.op for node in traced.graph.nodes] == [
        "placeholder",
        "call_module",
        "output",
    ]:
        return layer
    traced.delete_all_unused_submodules()
    new = fx.GraphModule(traced, traced.graph, type(block).__name__)
    for key, value in vars(block).items():
        if not key.startswith("_") and not hasattr(new, key):
            setattr(new, key, value)
    return new.train(block.training)


def plan_unknown_blocks(model: nn.Module) -> list[GenericEdit | Refusal]:
    """Plan the rewrite of modules that sum linear branches in their own forward; ``model`` is not changed.

    Outermost modules that are one linear map as a whole come first, then innermost modules with a sum somewhere in their forward.
    """
    looks = {
        path: _look(path, block) for path, block in model.named_modules() if _worth_a_look(block)
    }
    chosen: list[str] = []
    results: list[GenericEdit | Refusal] = []
    for whole, paths in ((True, list(looks)), (False, list(reversed(looks)))):
        for path in paths:
            look = looks[path]
            if (
                look is None
                or look.whole is not whole
                or any(_nested(path, other) for other in chosen)
            ):
                continue
            chosen.append(path)
            if result := look.plan(path, model.get_submodule(path)):
                results.append(result)
    return results


def _nested(one: str, two: str) -> bool:
    return (
        one == two or not one or not two or one.startswith(two + ".") or two.startswith(one + ".")
    )


def _worth_a_look(block: nn.Module) -> bool:
    if is_fuse_leaf(block) or type(block) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return False
    return sum(is_layer(m) or is_norm(m) for m in block.modules()) >= 2


@dataclass(frozen=True)
class _Look:
    """What the trace of a module showed: a region, or that torch.fx cannot follow (``traced`` None)."""

    traced: fx.GraphModule | None
    region: _Region | None

    @property
    def whole(self) -> bool:
        """The module is one linear map from its input to its output."""
        if self.region is None:
            return True
        return self.region.source.op == "placeholder" and [
            user.op for user in self.region.result.users
        ] == ["output"]

    def plan(self, path: str, block: nn.Module) -> GenericEdit | Refusal | None:
        """Compute and check the layer."""
        if self.traced is None or self.region is None:
            return _plan_whole(path, block)
        if not path:
            return Refusal(
                path,
                "sums linear branches in the model's own forward, which keeps its class; put them into a module of their own",
            )
        if reason := block_obstacle(block) or forward_hook_kind(block):
            return Refusal(path, f"sums linear branches; {reason}")
        symbol = self.region.value
        try:
            geometry, value, error = linear_map(
                _alone(block, self.region), symbol.geometry.channels, symbol.geometry.rank
            )
        except NotAffine as reason:
            return Refusal(path, f"sums linear branches, but {reason}")
        called = [
            node.target
            for node in self.traced.graph.nodes
            if node in self.region.inner and node.op == "call_module"
        ]
        return _edit(
            path,
            block,
            MergedLayer.of(geometry, value, block),
            tuple(f"{path}.{name}" for name in called),
            error,
            whole=False,
        )


def _look(path: str, block: nn.Module) -> _Look | None:
    try:
        traced = trace(block, is_fuse_leaf)
    except fx.proxy.TraceError:
        return None  # its control flow depends on data
    except Exception:  # something that fx cannot follow, such as an assignment to a slice
        return _Look(None, None) if path and _only_linear(block) else None
    region = _find_region(traced)
    return None if region is None else _Look(traced, region)


def _edit(
    path: str,
    block: nn.Module,
    layer: MergedLayer,
    parts: tuple[str, ...],
    error: float,
    *,
    whole: bool,
) -> GenericEdit:
    before = max((spread_of(m, m.weight) for m in block.modules() if is_layer(m)), default=None)
    fusion = Fusion(
        path,
        "unknown block",
        parts,
        error,
        "fx" if not whole else "gradients",
        None,
        before,
        spread_of(nn.Identity(), layer.value.kernel),
    )
    return GenericEdit(path, layer, whole, fusion)


def _only_linear(block: nn.Module) -> bool:
    """Whether nothing in ``block`` is known not to be linear, and it is small enough to try."""
    leaves = [module for module in block.modules() if next(module.children(), None) is None]
    known = (nn.Identity, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.ZeroPad2d)
    foreign = [
        m
        for m in leaves
        if type(m).__module__.startswith("torch.nn.")
        and not (is_layer(m) or is_norm(m) or isinstance(m, known))
    ]
    return (
        len(leaves) <= _MOST_LAYERS and not foreign and any(is_layer(module) for module in leaves)
    )


def _plan_whole(path: str, block: nn.Module) -> GenericEdit | None:
    """A module that cannot be traced but holds only linear layers may be one map as a whole."""
    layers = [module for module in block.modules() if is_layer(module)]
    hint = geometry_of(layers[0])
    if hint is None or hint.rank == 0 or block_obstacle(block) or forward_hook_kind(block):
        return None
    probe = copy.deepcopy(block).cpu().double()
    try:
        geometry, value, error = linear_map(probe.forward, hint.channels, hint.rank, hint)
    except NotAffine:
        return None
    # A rule for large values only would look linear at the scale of linear_map's own check.
    x = (
        torch.randn(3, geometry.channels, *(w + 7 for w in geometry.window), dtype=torch.float64)
        * 100
    )
    cost = sum(layer.weight.numel() for layer in layers)
    if (
        geometry.kernel_numel > cost
        or not relative_error(apply_map(x, geometry, value), probe.forward(x).detach()) <= TOLERANCE
    ):
        return None
    parts = tuple(f"{path}.{name}" for name, _ in block.named_children())
    return _edit(path, block, MergedLayer.of(geometry, value, block), parts, error, whole=True)
