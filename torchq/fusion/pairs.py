"""Which BatchNorm belongs to which layer, and why others belong to none."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchq.fusion.modules import (
    RescalesOutput,
    is_fuse_leaf,
    is_layer,
    is_norm,
    is_plain,
    layer_obstacle,
    norm_affine,
    norm_obstacle,
    output_channels,
    output_quantizer_of,
)
from torchq.fusion.report import Refusal
from torchq.graph import (
    Call,
    Flow,
    flow_of_graph,
    forward_hook_kind,
    record,
    trace_modules,
    why_untraceable,
)
from torchq.graph.operators import DROPOUTS, TRANSPOSED


def find_flow(
    model: nn.Module, example: object, recorded: Flow | None = None
) -> tuple[Flow, tuple[str, ...]]:
    """Return how data flows in ``model``, by a trace, a run or traced parts, and remarks.

    Args:
        model: left unchanged.
        example: as for :func:`torchq.fuse_`; None where there is none.
        recorded: the flow of a run on the example, whose modules of torch are one call each; None
            lets the model run.
    """
    if recorded is None and example is not None:
        recorded = record(model, copy.deepcopy(example), is_fuse_leaf)
    try:
        flow = flow_of_graph(trace_modules(model, is_fuse_leaf), model)
    except Exception as error:  # a model may fail to trace in any way it likes
        reason = why_untraceable(error)
        if recorded is not None:
            return recorded, (
                f"{reason}, so a run on the example was followed instead",
            )
        note = f"{reason}, so its parts were followed alone. Give an example to see the whole"
        return _flow_of_parts(model), (note,)
    return (flow if recorded is None else _with_ndims(flow, recorded)), ()


def _with_ndims(flow: Flow, recorded: Flow) -> Flow:
    """Return ``flow`` with the dimensions of module results that the recorded run saw."""

    def with_ndim(call: Call) -> Call:
        recorded_calls = [] if call.module is None else recorded.calls_of(call.module)
        return replace(
            call,
            shape=recorded_calls[0].shape
            if len({c.ndim for c in recorded_calls}) == 1
            else None,
        )

    return replace(flow, calls=tuple(map(with_ndim, flow.calls)))


def _flow_of_parts(model: nn.Module) -> Flow:
    """Return the flows of the parts that torch.fx can trace, one behind the other."""
    calls: list[Call] = []
    outputs: set[int] = set()
    read: set[int] = set()
    for prefix, flow in _traceable_parts(model, ""):
        start = len(calls)
        for call in flow.calls:
            inputs = tuple(start + index for index in call.inputs)
            index = start + call.index
            name = prefix + call.name
            calls.append(replace(call, index=index, name=name, inputs=inputs))
        outputs.update(start + index for index in flow.outputs)
        read |= flow.read
    return Flow(tuple(calls), frozenset(outputs), "fx", frozenset(read))


def _traceable_parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, Flow]]:
    """Yield path prefix and flow of the outermost parts that torch.fx can trace."""
    for name, child in module.named_children():
        path = f"{prefix}{name}."
        if is_fuse_leaf(child):
            continue
        try:
            flow = flow_of_graph(trace_modules(child, is_fuse_leaf), child)
        except Exception:  # look inside instead
            yield from _traceable_parts(child, path)
        else:
            yield path, flow


_KEEP_NDIM = (nn.Linear, nn.ReLU, nn.Hardswish, nn.GELU)
_FLATTENING = (("flatten", (1,)), ("flatten", (1, -1)))


def does_nothing(call: Call) -> bool:
    """Return True if ``call`` returns its input: an Identity, or dropout in eval mode."""
    module = call.module
    dropout = is_plain(module, *DROPOUTS) and not (module is None or module.training)
    return dropout or is_plain(module, nn.Identity)


def moves_features(call: Call) -> tuple[int, ...]:
    """Return the ndim of the tensor whose last axis ``call`` brings to axis 1, as one or none."""
    arguments = call.arguments
    if call.name == "flatten":
        axes = tuple(value for value in arguments if isinstance(value, int))
        return (3,) if axes == (0, 1) else ()
    if call.name != "permute":
        return ()
    if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)):
        arguments = tuple(arguments[0])
    moved = ((0, 2, 1), (0, 3, 1, 2), (0, 4, 1, 2, 3))
    return (len(arguments),) if tuple(arguments) in moved else ()


def inferred_ndim(flow: Flow, call: Call) -> int | None:
    """Return 2 if the input of ``call`` was flattened from axis 1 on, else None for unknown."""
    while len(call.inputs) == 1:
        call = flow.calls[call.inputs[0]]
        module: Any = call.module
        by_module = is_plain(module, nn.Flatten) and (
            module.start_dim,
            module.end_dim,
        ) == (1, -1)
        if by_module or (module is None and (call.name, call.arguments) in _FLATTENING):
            return 2
        # A quantized linear layer has a forward of its own.
        linear = isinstance(module, nn.Linear) and isinstance(module, RescalesOutput)
        if not (
            linear
            or is_plain(module, *_KEEP_NDIM)
            or is_norm(module)
            or does_nothing(call)
        ):
            return None
    return None


def border_obstacle(layer: Any) -> str | None:
    """Return why a shift before ``layer`` does not pass through it at the border, or None."""
    if isinstance(layer, nn.Linear):
        return None
    single_tap = set(layer.kernel_size) == {1}
    if isinstance(layer, TRANSPOSED):
        padded = any(layer.padding) or any(layer.output_padding)
        if single_tap and set(layer.stride) == {1} and not padded:
            return None
        return (
            "is transposed: how many taps overlap varies with the position, so a shift before it"
            " does not fold"
        )
    named = {"valid": False, "same": not single_tap}
    padded = (
        named[layer.padding] if isinstance(layer.padding, str) else any(layer.padding)
    )
    if layer.padding_mode != "zeros" or not padded:
        return None
    return (
        "pads with zeros, which a shift before it would change at the border;"
        " constant_pad=True pads explicitly instead"
    )


_READ_ELSEWHERE = "has parameters that are also read outside its own forward"


@dataclass(frozen=True)
class Pair:
    """The paths of a BatchNorm and of the layer before it, or of all behind it (``before``).

    ``pads``: the border has to be padded with the value that the BatchNorm maps to zero.
    """

    norm: str
    layers: tuple[str, ...]
    before: bool
    pads: bool
    found_by: str

    def is_on_grid(self, model: nn.Module) -> bool:
        """Return True if a quantized layer takes the BatchNorm behind it."""
        return not self.before and isinstance(
            model.get_submodule(self.layers[0]), RescalesOutput
        )


class _Refused(Exception):
    """A BatchNorm stays; the text is the reason."""


def find_pairs(
    model: nn.Module, flow: Flow, *, constant_pad: bool = False
) -> tuple[list[Pair], list[Refusal]]:
    """Return every BatchNorm of ``model`` as a pair, or as a refusal with its reason."""
    finder = _Finder(model, flow, constant_pad)
    pairs, refusals = [], []
    for name, module in model.named_modules():
        if not is_norm(module):
            continue
        try:
            pairs.append(finder.examine(name, module))
        except _Refused as reason:
            refusals.append(Refusal(name, str(reason)))
    return pairs, refusals


def _held_in_containers(model: nn.Module) -> dict[int, str]:
    """Return by id the modules in plain lists and dicts, which keep them, and where these are."""
    where_by_id: dict[int, str] = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key == "_modules" or not isinstance(value, (list, tuple, dict)):
                continue
            where = f"the {type(value).__name__} {path}{'.' if path else ''}{key}"
            members = value.values() if isinstance(value, dict) else value
            where_by_id |= {
                id(member): where for member in members if isinstance(member, nn.Module)
            }
    return where_by_id


def _holders(path: str) -> list[str]:
    """Return the paths of the modules that hold the one at ``path``, without the root."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]


class _Finder:
    """Examines the BatchNorms of one model, each layer being given to one BatchNorm only."""

    def __init__(self, model: nn.Module, flow: Flow, constant_pad: bool) -> None:
        self.model, self.flow, self.constant_pad = model, flow, constant_pad
        self.names = {id(module): name for name, module in model.named_modules()}
        self.held = _held_in_containers(model)
        #: Paths of the modules of which code outside reads an attribute.
        self.asked = {
            call.name.rpartition(".")[0] for call in flow.calls if call.module is None
        }
        self.taken: set[int] = set()

    def examine(self, name: str, norm: nn.Module) -> Pair:
        """Return the pair of a BatchNorm, or raise ``_Refused``."""
        if reason := norm_obstacle(norm):
            raise _Refused(reason)
        if id(norm) in self.held:
            raise _Refused(
                f"is also kept in {self.held[id(norm)]}, outside the module tree"
            )
        if id(norm) in self.flow.read or (name and name in self.asked):
            raise _Refused(_READ_ELSEWHERE)
        calls = self.flow.calls_of(norm)
        if not calls:
            raise _Refused(
                "is not called in the traced or recorded forward; give an example that reaches it"
            )
        try:
            layer = self._layer_before(norm, calls)
        except _Refused as reason:
            return self._pair_before(name, norm, calls, str(reason))
        return Pair(name, (self.names[id(layer)],), False, False, self.flow.origin)

    def _layer_obstacle(self, layer: nn.Module) -> str | None:
        if id(layer) in self.flow.read:
            return _READ_ELSEWHERE
        return layer_obstacle(layer)

    def _hook_between(self, first: str, second: str) -> str | None:
        """Return which hook of a module around one of two paths sees the value between them."""
        before = set(_holders(first))
        behind = set(_holders(second))
        for paths, kind, where in (
            (before - behind, "a forward hook", "is inside"),
            (behind - before, "a forward pre-hook", "comes before"),
        ):
            for path in paths:
                if forward_hook_kind(self.model.get_submodule(path)) == kind:
                    return f"{where} {path}, which has {kind}; remove the hook first"
        return None

    # -- layer, then norm ------------------------------------------------------------------------

    def _layer_before(self, norm: Any, calls: list[Call]) -> nn.Module:
        """Return the one layer whose results ``norm`` normalises, or raise ``_Refused``."""
        sources = [self._source(call) for call in calls]
        if len({id(source.module) for source in sources}) > 1:
            raise _Refused(
                f"is shared: it follows {', '.join(source.name for source in sources)}"
            )
        layer = sources[0].module
        name = sources[0].name
        assert layer is not None
        if len(self.flow.calls_of(layer)) != len(calls):
            raise _Refused(
                f"its layer {name} is shared: it is also called without this BatchNorm"
            )
        if reason := self._layer_obstacle(layer):
            raise _Refused(f"its layer {name} {reason}")
        channels = norm.running_mean.numel()
        out = output_channels(layer)
        if out != channels:
            raise _Refused(f"has {channels} channels, its layer {name} {out}")
        reason = None
        if isinstance(layer, RescalesOutput):
            reason = layer.output_scale_obstacle(norm_affine(norm)[0])
        elif output_quantizer_of(norm) is not None:
            reason = (
                "is float, and cannot take over the quantizer of the BatchNorm's result"
            )
        reason = reason or self._hook_between(
            self.names[id(layer)], self.names[id(norm)]
        )
        if reason:
            raise _Refused(f"its layer {name} {reason}")
        self._claim(layer, name)
        return layer

    def _claim(self, layer: nn.Module, name: str) -> None:
        """Give ``layer`` to the BatchNorm that is examined, or raise ``_Refused``."""
        if id(layer) in self.taken:
            raise _Refused(
                f"its layer {name} absorbs another BatchNorm; run fuse_ again"
            )
        self.taken.add(id(layer))

    def _source(self, call: Call) -> Call:
        """Return the layer call whose result ``call`` normalises, behind what changes no value."""
        at = call
        moved: tuple[int, ...] = ()
        while True:
            if len(at.inputs) != 1:
                raise _Refused(
                    "its input does not come from one convolution or linear layer"
                )
            source = self.flow.calls[at.inputs[0]]
            self._check_alone(source, at)
            if is_layer(source.module):
                self._check_axis(source, moved)
                return source
            if not (does_nothing(source) or moves_features(source)):
                raise _Refused(
                    f"its input comes from {source.name}, not from a convolution or linear layer"
                )
            moved += moves_features(source)
            at = source

    def _check_alone(self, source: Call, reader: Call) -> None:
        """Raise ``_Refused`` if something other than ``reader`` uses the result of ``source``."""
        if not (is_layer(source.module) or does_nothing(source)):
            return
        others = [
            call for call in self.flow.consumers(source) if call.index != reader.index
        ]
        if others:
            names = ", ".join(call.name for call in (reader, *others))
            raise _Refused(f"{source.name} has {len(others) + 1} consumers: {names}")
        if source.index in self.flow.outputs and is_layer(source.module):
            raise _Refused(f"{source.name} is also an output of the model")

    def _check_axis(self, source: Call, moved: tuple[int, ...]) -> None:
        """Raise ``_Refused`` unless the BatchNorm normalises the axis of the layer's features."""
        if not isinstance(source.module, nn.Linear):
            if moved:
                raise _Refused(f"{source.name} is rearranged before it is normalised")
            return
        ndim = source.ndim or inferred_ndim(self.flow, source)
        if ndim is None:
            raise _Refused(
                f"{source.name} is linear and the dimensions of its result are unknown;"
                " give an example"
            )
        if (ndim,) != (moved or (2,)):
            raise _Refused(
                f"{source.name} is linear on a {ndim}-d input: its features are the last axis,"
                " BatchNorm normalises axis 1"
            )

    # -- norm, then layers -----------------------------------------------------------------------

    def _pair_before(
        self, name: str, norm: Any, calls: list[Call], why_not_after: str
    ) -> Pair:
        """Return the pair of a BatchNorm and all layers that read it, or raise ``_Refused``."""
        alone = len(calls) == 1 and calls[0].index not in self.flow.outputs
        is_affine = not hasattr(norm, "act") and output_quantizer_of(norm) is None
        followers = self._followers(calls[0]) if alone and is_affine else []
        if not followers:
            raise _Refused(why_not_after)
        shifts = bool(norm_affine(norm)[1].any())
        pads = False
        for follower in followers:
            reason = self._follower_obstacle(follower, norm)
            reason = reason or self._hook_between(self.names[id(norm)], follower.name)
            if reason is None and shifts:
                reason = border_obstacle(follower.module)
                pads = reason is not None and self._may_pad(followers, norm)
                reason = None if pads else reason
            if reason:
                raise _Refused(
                    f"{why_not_after}; and {follower.name} after it {reason}"
                )
        for follower in followers:
            assert follower.module is not None
            self._claim(follower.module, follower.name)
        paths = tuple(follower.name for follower in followers)
        return Pair(name, paths, True, pads, self.flow.origin)

    def _may_pad(self, followers: list[Call], norm: nn.Module) -> bool:
        """Return True if the one layer behind ``norm`` may be padded explicitly."""
        layer: Any = followers[0].module
        if not self.constant_pad or len(followers) > 1 or isinstance(layer, TRANSPOSED):
            return False
        # Every channel needs a value that the BatchNorm maps to zero, to pad with.
        return isinstance(layer.padding, tuple) and bool(
            (norm_affine(norm)[0] != 0).all()
        )

    def _followers(self, call: Call) -> list[Call]:
        """Return the layer calls that read ``call``, or none where something else reads it too."""
        followers = []
        for consumer in self.flow.consumers(call):
            if does_nothing(consumer) and consumer.index not in self.flow.outputs:
                inner = self._followers(consumer)
                if not inner:
                    return []
                followers += inner
            elif is_layer(consumer.module) and len(consumer.inputs) == 1:
                followers.append(
                    replace(consumer, name=self.names[id(consumer.module)])
                )
            else:
                return []
        return followers

    def _follower_obstacle(self, follower: Call, norm: Any) -> str | None:
        """Return why ``norm`` cannot be folded into the layer behind it, border aside, or None."""
        layer: Any = follower.module
        if len(self.flow.calls_of(layer)) > 1:
            return "is called more than once"
        if follower.functional:
            return "is called as a function, perhaps with another padding than its own"
        if isinstance(layer, RescalesOutput):
            return "is quantized per output channel; fuse before quantizing"
        if reason := self._layer_obstacle(layer):
            return reason
        if not isinstance(layer, nn.Linear):
            same = layer.in_channels == norm.running_mean.numel()
            return None if same else "has another number of channels"
        ndim = follower.ndim or inferred_ndim(self.flow, follower)
        if ndim is None:
            return "is linear on an input of unknown dimensions; give an example"
        return None if ndim == 2 else f"is linear on a {ndim}-d input"
