"""What one float run on an example shows, and what conversion makes: all that planning reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import TorchqError
from torchq.fusion.modules import is_norm
from torchq.graph import (
    Flow,
    address_of,
    is_torch_leaf,
    record,
    tensors_in,
)
from torchq.graph.operators import CONVOLUTIONS
from torchq.graph.values import ValueTracker
from torchq.nn import QuantModule, QuantRecurrent, TensorQuantizer
from torchq.nn.calls.modules import RoutedModule
from torchq.nn.modules.operators import QuantCat
from torchq.runtime import Codes, Runtime
from torchq.swap.apply import (
    public_path,
    quantizer_slots,
    shared_paths,
    tried,
)
from torchq.swap.folds import (
    FoldingNorm,
    folding_pairs,
    norms_behind_layers,
    without_norms,
)
from torchq.swap.plan import Plan
from torchq.swap.same_results import cannot_run, computing_in_float
from torchq.utils import child_path


@dataclass(frozen=True)
class Value:
    """A tensor that a slot reads, in one call.

    Attributes:
        slot: the path of the quantizer.
        root: equal for tensors with the same values, also where elements only moved, max pooling
            chose some, or zeros were added around an image; -1 of a weight, which nothing is
            compared with.
        key: the address and size; equal for views of all elements.
        position: in the list of tensors that a concatenation reads; 0 elsewhere.
        amax: of a tensor that is concatenated, its largest magnitude.
        is_signed: it holds negative values; of tensors that are concatenated alone.
        is_nonnegative: the operators that computed it give no negative value, whatever they read.
    """

    slot: str
    root: int
    key: tuple[int, int]
    position: int = 0
    amax: float = 0.0
    is_signed: bool = False
    is_nonnegative: bool = False


@dataclass(frozen=True)
class Facts:
    """What planning reads of a model: its modules, what conversion makes of it, one run in float.

    Attributes:
        modules: path -> module, before conversion.
        mains: path of an addition -> the operand (0 or 1) that comes straight from a layer.
        operators: kinds of operators that the target quantizes.
        codes: the codes of activations that the target has; None for any.
        kernels: what the integer kernels of the target do; see :class:`torchq.runtime.Runtime`.
        computes_floats: the target has float kernels too; False without a target.
        inputs: path of a module with quantizers -> the paths of those of its inputs; None stands
            for a slot without one.
        descriptors: path of a quantizer -> how it quantizes.
        modes: path of a quantizer -> its mode, if that is another one than to quantize.
        optional: path of a quantizer that only some targets want -> the kind of operator that such
            targets name.
        factors: the paths of the quantizers of what products without a weight multiply.
        weights: the paths of the quantizers of weights.
        shared: the paths of quantizers that are one as soon as modules are converted.
        flow: the calls of the run; None without an example. Its modules are float.
        values: what quantizers would read, in the order of the run.
        results: path of a convolution -> the roots of its results; see :attr:`Value.root`.
        reached: paths of the modules with quantizers that a tensor reached.
        norms: path of a layer -> the BatchNorm behind it that will be folded into it. The flow is
            that of the folded model, and results are those of the BatchNorm.
        held: path of a quantizer -> the range that it has for good; see :mod:`torchq.swap.held`.
        included: the paths that ``include`` names, one by one.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    mains: Mapping[str, int] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    codes: Codes | None = None
    kernels: frozenset[str] = frozenset()
    computes_floats: bool = False
    inputs: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    descriptors: Mapping[str, QuantDescriptor] = field(default_factory=dict)
    modes: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    factors: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()
    shared: tuple[tuple[str, ...], ...] = ()
    flow: Flow | None = None
    values: Sequence[Value] = ()
    results: Mapping[str, Sequence[int]] = field(default_factory=dict)
    reached: Set[str] = frozenset()
    norms: Mapping[str, FoldingNorm] = field(default_factory=dict)
    held: Mapping[str, Hashable] = field(default_factory=dict)
    included: Set[str] = frozenset()

    @classmethod
    def before_conversion(
        cls, model: nn.Module, runtime: Runtime | None, mains: Mapping[str, int]
    ) -> Facts:
        """Return what is known before anything is converted."""
        modules = dict(model.named_modules(remove_duplicate=False))
        if runtime is None:
            return cls(modules)
        kinds = (
            frozenset[str]()
            if runtime.placement is None
            else runtime.placement.operators
        )
        computes_floats = runtime.plans and runtime.computes_floats
        codes, kernels = runtime.codes, runtime.kernels
        return cls(modules, mains, kinds, codes, kernels, computes_floats)

    def converted(self, model: nn.Module, plan: Plan, example: object = None) -> Facts:
        """Let ``model`` be quantized as ``plan`` says for a while, and run it once in float."""
        with tried(model, plan):
            return self.observed(model, example)

    def observed(self, model: nn.Module, example: object = None) -> Facts:
        """Return what a quantized model shows as it is now; with an example, in one float run."""
        facts = replace(self, **_made(model))
        if example is None:
            return facts
        float_run = _Seen(model)
        try:
            shown = float_run.run(example)
        except TorchqError:
            raise
        except Exception as error:  # whatever the code of the model raises
            raise cannot_run(model, error) from error
        pairs = folding_pairs(model, example, shown["flow"])
        norms = norms_behind_layers(model, pairs)
        shown["results"] = float_run.results_with(norms)
        gone = {id(model.get_submodule(pair.norm)): pair.norm for pair in pairs}
        shown["flow"] = without_norms(shown["flow"], gone)
        return replace(facts, **shown, norms=norms)


def _made(model: nn.Module) -> dict[str, Any]:
    """Return the facts about the quantizers of a quantized model."""
    quantizers = dict(quantizer_slots(model))
    inputs: dict[str, tuple[str | None, ...]] = {}
    optional: dict[str, str] = {}
    factors: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TensorQuantizer):
            inputs[path] = (public_path(path),)
        elif isinstance(module, QuantModule):
            slots = {
                slot: public_path(child_path(path, f"{slot}_quantizer"))
                for slot in module.input_slots
            }
            inputs[path] = tuple(p if p in quantizers else None for p in slots.values())
            optional |= {
                slots[slot]: kind for slot, kind in module.optional_slots.items()
            }
            factors.update(slots[slot] for slot in module.factor_slots)
    of_weights = _ids_of_weights(model)
    return {
        "inputs": inputs,
        "descriptors": {
            path: q.descriptor.replace(name=None) for path, q in quantizers.items()
        },
        "modes": {
            path: q.mode for path, q in quantizers.items() if q.mode != "quantize"
        },
        "optional": {
            path: kind for path, kind in optional.items() if path in quantizers
        },
        "factors": frozenset(factors.intersection(quantizers)),
        "weights": frozenset(p for p, q in quantizers.items() if id(q) in of_weights),
        "shared": shared_paths(model),
    }


def _ids_of_weights(model: nn.Module) -> set[int]:
    """Return the ids of the quantizers of weights."""
    return {
        id(quantizer)
        for module in model.modules()
        if isinstance(module, QuantModule)
        for quantizer, _ in module.quantized_weights()
    }


def is_leaf(module: nn.Module) -> bool:
    """Return True for modules that count as one call: quantized ones, and those of torch."""
    if isinstance(module, QuantModule):
        return not module.is_container and bool(
            module.slots() or module.quantizes_output
        )
    is_frozen_norm = is_norm(module) and next(module.children(), None) is None
    return (
        isinstance(module, TensorQuantizer) or is_frozen_norm or is_torch_leaf(module)
    )


class _Seen:
    """Notes what quantizers, concatenations and convolutions of a quantized model see in a run."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._weights = _ids_of_weights(model)
        self._tracker = ValueTracker()
        self.values: list[Value] = []
        self._results: dict[str, list[int]] = {}
        self._of_norms: dict[str, list[int]] = {}
        self.reached: set[str] = set()

    def run(self, example: object) -> dict[str, Any]:
        """Run the model once in float, and return the facts that this shows."""
        watched = dict(self._watched())
        with computing_in_float(self._model):
            flow = record(
                self._model,
                example,
                is_leaf,
                watch=watched,
                tracker=self._tracker,
                # As if they were on.
                renewed=self._handing_on(),
            )
        self._tracker.forget()
        names = ("values", "reached")
        return {"flow": flow, **{name: getattr(self, name) for name in names}}

    def _handing_on(self) -> Iterator[TensorQuantizer]:
        """Yield the quantizers whose results others than the layer that holds them can read.

        A layer reads its weight alone, so nothing tells a weight from its quantized copy, and no
        copy of it has to be kept. Not so where the forward of a parent calls a function with the
        weight of a layer, and with its quantizers.
        """
        lent = {
            id(holder)
            for module in self._model.modules()
            if isinstance(module, RoutedModule)
            for _, holder in module.holders()
        }
        inside_layers = {
            id(quantizer)
            for module in self._model.modules()
            if isinstance(module, QuantModule) and is_leaf(module)
            for quantizer in module.children()
            if id(module) not in lent
        }
        for module in self._model.modules():
            if isinstance(module, TensorQuantizer):
                is_inside = id(module) in inside_layers
                if not (is_inside and id(module) in self._weights):
                    yield module

    def _watched(self) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
        cats = [
            m
            for m in self._model.modules()
            if isinstance(m, QuantCat) and m.ranges == 1
        ]
        of_cats = {id(cat.input_quantizer) for cat in cats}
        for path, module in self._model.named_modules():
            if isinstance(module, TensorQuantizer):
                if id(module) not in of_cats:
                    is_weight = id(module) in self._weights
                    yield module, partial(self._read, public_path(path), is_weight)
            elif isinstance(module, QuantModule) and not module.is_container:
                yield module, partial(self._called, path, module)
            elif is_norm(module):
                yield module, partial(self._normalised, path)

    def results_with(self, norms: Mapping[str, FoldingNorm]) -> dict[str, list[int]]:
        """Return the roots of the results of layers; of some, those of the BatchNorms behind."""
        folded = {
            path: self._of_norms.get(norm.names[0], []) for path, norm in norms.items()
        }
        found = {**self._results, **folded}
        return {path: roots for path, roots in found.items() if roots}

    def _called(
        self,
        path: str,
        module: nn.Module,
        args: Sequence[object],
        kwargs: object,
        result: object,
    ) -> None:
        """Note a call of a quantized module, before it with ``result`` None, and after it."""
        if result is None:
            # Attention calls no quantizer of its own while all are off, so its operands tell.
            if any(tensor.is_floating_point() for tensor in tensors_in((args, kwargs))):
                self.reached.add(path)
            if isinstance(module, QuantCat) and module.ranges == 1 and args:
                self._concatenated(f"{path}.input_quantizer", module, args[0])
            if isinstance(module, QuantRecurrent) and args:
                self._read_by_recurrent(path, module, args[0])
        elif isinstance(module, CONVOLUTIONS) and isinstance(result, Tensor):
            self._results.setdefault(path, []).append(self._tracker.root_of(result))
        elif is_norm(module):
            self._normalised(path, args, kwargs, result)

    def _read_by_recurrent(
        self, path: str, module: QuantRecurrent, sequence: object
    ) -> None:
        """Note what a recurrent layer reads, which calls no quantizer while all are off."""
        slot = f"{module.input_slots[0]}_quantizer"
        is_quantized = isinstance(getattr(module, slot), TensorQuantizer)
        if is_quantized and isinstance(sequence, Tensor):
            self._read(child_path(path, slot), False, (sequence,), None, None)

    def _normalised(
        self, path: str, args: object, kwargs: object, result: object
    ) -> None:
        """Note the result of a BatchNorm, which may be folded into the layer in front of it."""
        if isinstance(result, Tensor):
            self._of_norms.setdefault(path, []).append(self._tracker.root_of(result))

    def _concatenated(self, slot: str, module: QuantCat, tensors: object) -> None:
        is_quantized = isinstance(module.input_quantizer, TensorQuantizer)
        if not isinstance(tensors, Sequence) or not is_quantized:
            return
        for position, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                size = float(tensor.abs().max()) if tensor.numel() else 0.0
                is_signed = bool(tensor.numel()) and bool(tensor.min() < 0)
                root = self._tracker.root_of(tensor)
                key = _key(tensor)
                proved = self._tracker.is_nonnegative(tensor)
                self.values.append(
                    Value(slot, root, key, position, size, is_signed, proved)
                )

    def _read(
        self, slot: str, is_weight: bool, args: Any, kwargs: object, result: object
    ) -> None:
        if result is None and args:
            x = args[0]
            root = -1 if is_weight else self._tracker.root_of(x)
            proved = self._tracker.is_nonnegative(x)
            self.values.append(Value(slot, root, _key(x), is_nonnegative=proved))


def _key(tensor: Tensor) -> tuple[int, int]:
    has_memory = address_of(tensor) is not None
    return tensor.data_ptr() if has_memory else id(tensor), tensor.numel()
