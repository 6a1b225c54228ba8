"""Blocks of parallel linear branches: how each family is merged into one layer, and checked."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from torchq.errors import ConfigError
from torchq.fusion.algebra import KernelBias
from torchq.fusion.fold import replace_parameter
from torchq.fusion.linear_map import (
    TOLERANCE,
    Function,
    Geometry,
    NotAffine,
    linear_map,
    random_inputs,
    relative_error,
)
from torchq.fusion.modules import block_obstacle, is_layer, is_norm, spatial_dims_of
from torchq.fusion.report import Fusion, Refusal
from torchq.graph.operators import CONVOLUTIONS
from torchq.utils import Registry, copy_module, set_submodule


def geometry_of(layer: object) -> Geometry | None:
    """Return the geometry of a layer's dense kernel; None without padding by numbers of zeros."""
    if isinstance(layer, nn.Linear):
        return Geometry(layer.in_features, layer.out_features, 1, (), (), (), ())
    if not isinstance(layer, CONVOLUTIONS) or isinstance(layer.padding, str):
        return None
    if layer.padding_mode != "zeros" and any(layer.padding):
        return None
    window = tuple(
        d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)
    )
    channels = (layer.in_channels, layer.out_channels, layer.groups)
    return Geometry(*channels, window, layer.padding, layer.padding, layer.stride)


@dataclass(frozen=True)
class MergedLayer:
    """One layer of symmetric padding that replaces a whole linear part; its value is float64."""

    geometry: Geometry
    value: KernelBias
    dtype: torch.dtype
    device: torch.device
    trainable: bool
    training: bool
    channels_last: bool

    @classmethod
    def of(cls, geometry: Geometry, value: KernelBias, block: nn.Module) -> MergedLayer:
        """Return the layer with the dtype, device and mode of ``block``."""
        weights = [module.weight for module in block.modules() if is_layer(module)]
        tensors = [*weights, *block.parameters(), *block.buffers()]
        like = next(tensor for tensor in tensors if tensor.is_floating_point())
        trainable = any(parameter.requires_grad for parameter in block.parameters())
        last = {"memory_format": torch.channels_last}
        channels_last = any(
            t.is_contiguous(**last) and not t.is_contiguous() for t in tensors
        )
        mode = (trainable, block.training, channels_last)
        return cls(geometry, value, like.dtype, like.device, *mode)

    def record(self) -> dict[str, Any]:
        """Return class and constructor arguments of the module, as JSON data."""
        g = self.geometry
        if g.spatial_dims == 0:
            return {
                "class": "Linear",
                "in_features": g.in_channels,
                "out_features": g.out_channels,
            }
        return {
            "class": f"Conv{g.spatial_dims}d",
            "in_channels": g.in_channels,
            "out_channels": g.out_channels,
            "kernel_size": list(g.window),
            "stride": list(g.stride),
            "padding": list(g.before),
            "groups": g.groups,
        }

    def like(self, block: nn.Module) -> MergedLayer:
        """Return the same map for another copy of the block, say in float64."""
        return MergedLayer.of(self.geometry, self.value, block)

    def make(self) -> nn.Module:
        """Return a new module."""
        g = self.geometry
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        if g.spatial_dims == 0:
            layer: nn.Module = skip_init(
                nn.Linear, g.in_channels, g.out_channels, **options
            )
        else:
            cls = CONVOLUTIONS[g.spatial_dims - 1]
            arguments = (
                g.in_channels,
                g.out_channels,
                g.window,
                g.stride,
                g.before,
                1,
                g.groups,
            )
            layer = skip_init(cls, *arguments, **options)
        self.put_into(layer)
        if self.channels_last and g.spatial_dims == 2:
            layer.to(memory_format=torch.channels_last)
        return layer.train(self.training).requires_grad_(self.trainable)

    def put_into(self, layer: Any) -> None:
        """Give an existing layer of this geometry the merged parameters."""
        if not isinstance(layer, nn.Linear) and set(layer.dilation) != {1}:
            layer.kernel_size = self.geometry.window
            layer.dilation = (1,) * self.geometry.spatial_dims
        replace_parameter(layer, "weight", self.value.kernel)
        replace_parameter(layer, "bias", self.value.bias)


#: ``merge(function, main)`` returns the one layer that ``function`` is; ``main`` is the layer
#: whose geometry the result takes where that is exact.
Merge = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class BlockRule:
    """How one family of blocks is merged.

    Attributes:
        name: the name of the family, for the report and the record.
        has: attributes that the training form has (they may be None).
        branches: attributes, as globs, that are removed; the first layer found in them gives
            spatial dimensions, channels and geometry.
        writes: the attribute that receives the merged layer; with None it replaces the whole
            block, in front of what ``bypass`` names. A layer of the right geometry that is there
            already gets new parameters and stays the same object.
        bypass: attributes applied after the linear part; an Identity replaces them while the
            linear part is read.
        lacks: attributes that must be missing or None (the deployed form has them).
        flags: attributes set afterwards, where the block has them.
        when: a further condition.
        linear: the linear part as a function of the block and its input, where ``forward``
            cannot be used.
        finish: a last change of the merged block.
        loose: the names are common ones: a block that turns out not to be linear is not worth a
            line in the report.
    """

    name: str
    has: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    writes: str | None = None
    bypass: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    flags: Mapping[str, object] = field(default_factory=dict)
    when: Callable[[Any], bool] | None = None
    linear: Callable[[Any, Tensor], Tensor] | None = None
    finish: Callable[[Any], None] | None = None
    loose: bool = False

    def matches(self, block: object) -> bool:
        """Return True if ``block`` is this family's training form."""
        if not all(hasattr(block, name) for name in self.has):
            return False
        if any(getattr(block, name, None) is not None for name in self.lacks):
            return False
        return self.when is None or self.when(block)

    def convert(self, block: nn.Module, merge: Merge) -> Any:
        """Bring ``block`` into its deployed form, in place.

        Args:
            block: a block for which :meth:`matches` is true.
            merge: see :data:`Merge`.

        Returns:
            What replaces the block, or None where the block stays.
        """
        main = main_layer(block, self.branches)
        linear = self.linear
        with _bypassed(block, self.bypass):
            if linear is None:
                layer = merge(block.forward, main)
            else:
                layer = merge(lambda x: linear(block, x), main)
        if self.writes is None:
            after = [getattr(block, name, None) for name in self.bypass]
            behind = [module for module in after if isinstance(module, nn.Module)]
            return nn.Sequential(layer.make(), *behind) if behind else layer.make()
        names = attributes_like(block, self.branches)
        remove(block, [name for name in names if name != self.writes])
        _write(block, self.writes, layer)
        for name, value in self.flags.items():
            if hasattr(block, name):
                setattr(block, name, value)
        if self.finish is not None:
            self.finish(block)
        return None


#: Rules by family. A block is tried against later entries first, so a user's rule precedes the
#: built-in ones, and special families precede the general ones.
BLOCKS: Registry[str, BlockRule] = Registry("block family")

T = TypeVar("T")


def register_block(name: str, **fields: Any) -> Callable[[T], T]:
    """Teach :func:`torchq.fuse_` a block: decorate its class, or a predicate ``(module) -> bool``.

    Args:
        name: the name of the family.
        **fields: those of :class:`BlockRule`; usually ``branches``, ``writes`` and ``bypass``.

    Returns:
        The decorator, which returns what it decorates.

    Raises:
        ConfigError: the name is taken, or neither a class nor a predicate was decorated.

    Example:
        >>> @register_block("two", branches=("wide", "narrow"), writes="merged")
        ... class Two(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.wide = torch.nn.Conv2d(4, 4, 3, padding=1)
        ...         self.narrow = torch.nn.Conv2d(4, 4, 1)
        ...     def forward(self, x):
        ...         if hasattr(self, "merged"):
        ...             return self.merged(x)
        ...         return self.wide(x) + self.narrow(x)
        >>> model = torch.nn.Sequential(Two()).eval()
        >>> torchq.fuse_(model).fused[0].kind
        'two'
        >>> BLOCKS.remove("two")
    """

    def decorator(target: T) -> T:
        condition: Any = target
        if not callable(condition):
            raise ConfigError(
                f"register_block({name!r}): got {target!r}; expected a class or a predicate"
            )
        is_class = isinstance(condition, type)
        if is_class:
            fields.setdefault(
                "has", tuple(b for b in fields.get("branches", ()) if "*" not in b)
            )
        when = (lambda block: isinstance(block, condition)) if is_class else condition
        BLOCKS.add(name, BlockRule(name=name, when=when, **fields))
        return target

    return decorator


# -- helpers for rules -------------------------------------------------------------------------


@contextmanager
def _bypassed(block: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Replace child modules by Identity, and put them back."""
    children = {name: getattr(block, name, None) for name in names}
    replaced = {
        name: child for name, child in children.items() if isinstance(child, nn.Module)
    }
    try:
        for name in replaced:
            setattr(block, name, nn.Identity())
        yield
    finally:
        for name, child in replaced.items():
            setattr(block, name, child)


def attributes_like(block: nn.Module, globs: tuple[str, ...]) -> list[str]:
    """Return the attributes of ``block`` that match, in the order of ``globs``."""
    attributes = [
        *vars(block),
        *(name for name, _ in block.named_children()),
        *(name for name, _ in block.named_parameters(recurse=False)),
        *(name for name, _ in block.named_buffers(recurse=False)),
        # What is registered as None, and a second name of a child, is listed nowhere above.
        *(name for name in globs if "*" not in name and hasattr(block, name)),
    ]
    names = list(dict.fromkeys(attributes))
    return [name for glob in globs for name in names if fnmatch.fnmatchcase(name, glob)]


def main_layer(block: nn.Module, globs: tuple[str, ...]) -> nn.Module:
    """Return the first layer, or else the first BatchNorm, among the attributes that match."""
    children = [getattr(block, name) for name in attributes_like(block, globs)]
    roots = [child for child in children if isinstance(child, nn.Module)]
    inside = [module for root in roots for module in root.modules()]
    candidates = [m for m in inside if is_layer(m)] or [m for m in inside if is_norm(m)]
    if not candidates:
        raise NotAffine("no layer in its branches")
    return candidates[0]


def remove(block: nn.Module, names: list[str]) -> None:
    """Delete attributes."""
    for name in names:
        if hasattr(block, name):
            delattr(block, name)


def _write(block: object, name: str, layer: MergedLayer) -> None:
    """Put the merged layer at ``name``: into a layer of its geometry there, else as a new one."""
    old = getattr(block, name, None)
    if is_layer(old) and geometry_of(old) == layer.geometry:
        layer.put_into(old)
        return
    if name in vars(block):  # a plain attribute would hide the child
        delattr(block, name)
    setattr(block, name, layer.make())


@dataclass(frozen=True)
class BlockEdit:
    """A planned merge of a block, or one of a record, without ``fusion``; layers are in order."""

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
        return {
            "kind": "block",
            "path": self.path,
            "family": self.rule.name,
            "layers": layers,
        }


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
    """Return True if a norm multiplies all channels by zero, as residual blocks often begin."""
    # Such a block computes less than it will after training: that it looks linear proves nothing.
    weights = [m.weight for m in block.modules() if is_norm(m)]
    return any(weight is not None and not weight.detach().any() for weight in weights)


def _convert_copy(path: str, block: nn.Module, rule: BlockRule) -> BlockEdit:
    """Convert a float64 copy of ``block`` and compare it with the block."""
    probe = copy_module(block).cpu().double()
    reference = copy_module(probe)
    layers: list[MergedLayer] = []
    errors: list[float] = []

    def merge(
        function: Function, main: Any = None, *, in_channels: int | None = None
    ) -> MergedLayer:
        hint = geometry_of(main) if is_layer(main) else None
        if in_channels is None:
            in_channels = (
                main.running_mean.numel() if hint is None else hint.in_channels
            )
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
    present = [
        n
        for n in attributes_like(block, rule.branches)
        if getattr(block, n) is not None
    ]
    parts = tuple(f"{path}.{name}".lstrip(".") for name in present)
    name = path if rule.writes is None else f"{path}.{rule.writes}".lstrip(".")
    fusion = Fusion(name, rule.name, parts, max(errors), "names")
    return BlockEdit(path, rule, tuple(layers), fusion)


def _block_error(before: nn.Module, after: nn.Module, layer: MergedLayer) -> float:
    """Return the error of the whole block on two sizes; 0 for one that needs several tensors."""
    error = 0.0
    for x in random_inputs(layer.geometry, (2, 5)):
        with torch.no_grad():
            try:
                want = before.forward(x)
            # The forward expects a list of feature maps or further arguments.
            except Exception:
                return error
            if not isinstance(want, Tensor):
                return error
            try:
                actual = after.forward(x)
            # As another block with parts of these names raises it.
            except Exception as reason:
                raise NotAffine(
                    f"its forward fails without its branches ({reason})"
                ) from reason
            error = max(error, relative_error(actual, want))
    return error
