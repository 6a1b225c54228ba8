"""The planning passes that read what a run shows; each is a function ``(plan, facts) -> plan``.

A pass reads the plan so far and the facts of one float run, nothing else: no module and no config.
So a plan depends on no order in which things were tried, and nothing needs to be undone. Here are
the passes that all targets have, and what several have; those of one stand in its folder. Without
an example there was no run, ``facts.flow`` is None, and most passes change nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeGuard

from torch import fx, nn

from torchq.descriptor import QuantDescriptor
from torchq.formats import PerTensor
from torchq.functional.windows import windows_of_call, windows_of_module
from torchq.fusion.modules import is_norm, is_plain
from torchq.graph import (
    OPERATORS,
    Call,
    Flow,
    effects_of,
    operator_named,
    operator_of,
)
from torchq.graph.operators import CONVOLUTIONS, DROPOUTS, LAYERS, TRANSPOSED
from torchq.graph.values import adds_zeros
from torchq.nn import (
    Add,
    Cat,
    MatMul,
    Mul,
    QuantModule,
    ScaledDotProductAttention,
    Tap,
    TensorQuantizer,
)
from torchq.runtime import PlanPass, Runtime
from torchq.swap.facts import Facts, Value
from torchq.swap.grids import has_choice, in_codes, in_file
from torchq.swap.heads import (
    BY,
    behind_last_layers,
    heads_in_float,
    last_layers_in_16_bits,
    last_layers_in_float,
)
from torchq.swap.held import apart
from torchq.swap.plan import ALREADY, Decision, Plan, canonical_groups
from torchq.swap.share import BEFORE_NORM, RESULT_IN_FLOAT

_MOVING_MODULES = (nn.Flatten, nn.Unflatten)
_DROPOUT_FUNCTIONS = frozenset(["dropout", "dropout1d", "dropout2d", "dropout3d"])
_PADDING_MODULES = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
_BYTE = 8
_UP_TO_A_BYTE = range(1, _BYTE + 1)
_QUANTIZING = frozenset(["quantize", "observe+quantize"])
#: Class of an operator that is a module -> the function that its forward calls in float.
_ROWS = map(OPERATORS.__getitem__, OPERATORS)
_FUNCTIONS = {
    row.module: row.name for row in _ROWS if row.module not in (None, "", "Tap")
}


def is_depthwise(
    module: nn.Module | None,
) -> TypeGuard[nn.Conv1d | nn.Conv2d | nn.Conv3d]:
    """Return True for a convolution of each channel by itself."""
    if not isinstance(module, CONVOLUTIONS):
        return False
    return 1 < module.groups == module.in_channels == module.out_channels


class View:
    """The calls of the float run, as files have them.

    Operators that a plan leaves in float are functions, and what does nothing is not there.
    """

    def __init__(self, plan: Plan, facts: Facts) -> None:
        self._plan, self._facts = plan, facts
        assert facts.flow is not None
        self.flow = _as_files_have_it(plan, facts.flow)

    @cached_property
    def head(self) -> frozenset[int]:
        """The calls that make boxes and scores of a detector's last maps."""
        assert self._facts.flow is not None
        return behind_last_layers(self._facts.flow)

    def path(self, call: Call) -> str:
        """Return the path of the module of a call; "" for functions."""
        return call.name if call.module is not None else ""

    def quantizes(self, call: Call) -> bool:
        """Return True for a quantizer, and for a layer that quantizes what it reads."""
        slots = self._facts.inputs[call.name] if self.is_quantized(call) else (None,)
        modes = self._plan.modes
        return all(
            p is not None and modes.get(p, "quantize") in _QUANTIZING for p in slots
        )

    def is_quantized(self, call: Call) -> bool:
        """Return True for a module with quantizers, and for a quantizer."""
        if call.module is None or self.path(call) not in self._facts.inputs:
            return False
        decision = self._plan.decision(self.path(call))
        return decision is None or not decision.reason or decision.reason == ALREADY

    def is_float_layer(self, call: Call) -> bool:
        """Return True for a layer with weights that is not quantized."""
        return isinstance(call.module, LAYERS) and not self.is_quantized(call)

    def is_last_layer(self, call: Call) -> bool:
        """Return True for a layer of a detector's head that stays float for its results."""
        decision = self._plan.decision(self.path(call))
        return decision is not None and decision.by == BY and self.is_float_layer(call)

    def moves_elements(self, call: Call) -> bool:
        """Return True for a call that rearranges the elements of a tensor, or returns it."""
        if call.module is None:
            return has_effect(call, "move")
        return isinstance(call.module, _MOVING_MODULES) and not self.is_quantized(call)

    def scales(self, reader: Call, call: Call) -> bool:
        """Return True for attention that multiplies a result by its scale and quantizes that."""
        is_attention = isinstance(reader.module, ScaledDotProductAttention)
        return is_attention and reader.inputs[:1] == (call.index,)

    def is_stored(self, index: int) -> bool:
        """Return True for the number of a call that computes with stored numbers alone."""
        return self.flow.calls[index].stored


def _as_files_have_it(plan: Plan, flow: Flow) -> Flow:
    in_float = {
        d.name: d.class_name
        for d in plan.skipped
        if d.class_name in (*_FUNCTIONS, "Tap")
    }
    # What leaves nothing in a file -> the calls whose results it returns.
    sources_of: dict[int, tuple[int, ...]] = {}
    calls = []
    for call in flow.calls:
        inputs = tuple(
            source for i in call.inputs for source in sources_of.get(i, (i,))
        )
        operands = tuple(
            source for i in call.operands for source in sources_of.get(i, (i,)) or (-1,)
        )
        kind = in_float.get(call.name, "") if call.module is not None else ""
        if call.returned is not None:
            sources_of[call.index] = tuple(
                source for i in call.returned for source in sources_of.get(i, (i,))
            )
            inputs = ()
        elif kind == "Tap" or does_nothing(call):
            sources_of[call.index] = inputs
            inputs = ()
        elif kind:
            call = replace(call, name=_FUNCTIONS[kind], module=None)
        calls.append(replace(call, inputs=inputs, operands=operands))
    outputs = frozenset(
        source for i in flow.outputs for source in sources_of.get(i, (i,))
    )
    return replace(flow, calls=tuple(calls), outputs=outputs)


def does_nothing(call: Call) -> bool:
    """Return True for a call that returns its input in a run in eval mode."""
    if call.module is not None:
        # A quantizer that is switched off gives back its input too.
        of_torchq = isinstance(call.module, (QuantModule, TensorQuantizer))
        is_idle = call.idle and not of_torchq
        return is_idle or is_plain(call.module, nn.Identity, *DROPOUTS)
    is_dropout = call.name in _DROPOUT_FUNCTIONS and len(call.inputs) == 1
    trains = call.options.get("training", call.arguments[1:2] != (False,))
    return is_dropout and not trains


def _operator(call: Call) -> str:
    """Return the name of the operator of a function call; "" for modules and other functions."""
    row = None if call.module is not None else operator_named(call.name)
    return "" if row is None else row.name


def has_effect(call: Call, effect: str) -> bool:
    """Return True for a function call that has an effect; see :class:`torchq.graph.Operator`."""
    return call.module is None and effect in effects_of(call.name)


def is_relu(call: Call) -> bool:
    """Return True for a ReLU, as a module or as a function."""
    return isinstance(call.module, nn.ReLU) or _operator(call) == "relu"


def clips(call: Call) -> bool:
    """Return True for ReLU and its like, which a quantizer behind them includes."""
    return isinstance(call.module, (nn.ReLU, nn.Hardtanh)) or has_effect(call, "clip")


def _joins(call: Call) -> bool:
    """Return True for a function that concatenates tensors."""
    return _operator(call) == "cat"


def _averages_function(call: Call) -> bool:
    """Return True for means over images, as functions or as modules."""
    if call.module is not None:
        return isinstance(call.module, (nn.AvgPool2d, nn.AdaptiveAvgPool2d))
    return _operator(call) in ("mean", "avg_pool2d", "adaptive_avg_pool2d")


def _cuts_at_zero(call: Call) -> bool:
    """Return True for ReLU and ReLU6, and clips that let no negative value through."""
    if isinstance(call.module, nn.Hardtanh):
        return call.module.min_val >= 0
    return is_relu(call) or _operator(call) == "relu6"


def pads_with_zeros(call: Call) -> bool:
    """Return True for zeros around a tensor, which files let convolutions behind them add."""
    module = call.module
    if module is not None:
        return isinstance(module, _PADDING_MODULES) and module.value == 0
    return adds_zeros(call.name, call.arguments, call.options)


# --- what conversion makes ----------------------------------------------------------------------


def switches(plan: Plan, facts: Facts) -> Plan:
    """Let quantizers that conversion leaves off stay off, unless the target wants them."""
    on_for_target = facts.operators
    rows = {d.name for d in plan.replaced}
    switched_off = {
        path: mode
        for path, mode in facts.modes.items()
        if path.rpartition(".")[0] not in rows
        or facts.optional.get(path) not in on_for_target
    }
    return replace(plan, modes={**switched_off, **plan.modes}, shared=facts.shared)


# --- what stays float ---------------------------------------------------------------------------


_NO_TENSOR = "its operands are no tensors in the run on the example, or it does not run"


_NO_INPUT = "it computes with stored numbers alone, so its result is stored too"


def drop_unreached(plan: Plan, facts: Facts) -> Plan:
    """Leave operators in float that no tensor of the example reaches.

    That is so where they read no tensor, and where all that they read is stored or made of numbers,
    as the anchors of a detector are: a file has the result, and so may the model after its first
    call, which then calls no quantizer.
    """
    if facts.flow is None:
        return plan
    operators = [decision.name for decision in plan.operator_rows()]
    reasons = {name: _NO_TENSOR for name in operators if name not in facts.reached}
    calls = facts.flow.calls
    depends = {
        call.name for call in calls if call.module is not None and not call.stored
    }
    stored = {call.name for call in calls if call.stored} - depends
    reasons |= {name: _NO_INPUT for name in operators if name in stored}
    return plan.in_float(reasons, "run on the example")


def leave_out_unread(plan: Plan, facts: Facts) -> Plan:
    """Leave out the work of modules on which no result of the model depends.

    Before: the work is that of all modules. After: it is that of a file, which has no such module:
    the last residual of a WaveNet, or a head whose result the forward drops.
    """
    flow, work = facts.flow, plan.work
    if flow is None or work is None or not work.measured or not flow.outputs:
        return plan
    modules = [call for call in flow.calls if call.module is not None]
    called = {call.name for call in modules}
    unread = called - {call.name for call in modules if call.index in flow.live}
    amounts = {name: n for name, n in work.amounts.items() if name not in unread}
    classes = {name: text for name, text in work.classes.items() if name in amounts}
    return replace(plan, work=replace(work, amounts=amounts, classes=classes))


def slot_of_range(slot: str, position: int) -> str:
    """Return the path of the quantizer of the tensor at a position of a concatenation."""
    return (
        slot.replace("input_quantizer", f"input{position}_quantizer")
        if position
        else slot
    )


def values_read(plan: Plan, facts: Facts) -> Iterator[tuple[str, Value]]:
    """Yield the path of each quantizer of a plan with what it reads, once for each call."""
    gone = {d.name for d in plan.skipped if d.reason != ALREADY}
    ranges = {f"{d.name}.input_quantizer": d.ranges for d in plan.replaced}
    for value in facts.values:
        if value.slot.rpartition(".")[0] not in gone:
            position = (
                value.position if value.position < ranges.get(value.slot, 1) else 0
            )
            yield slot_of_range(value.slot, position), value


def share_ranges(plan: Plan, facts: Facts) -> Plan:
    """Let quantizers of one tensor be one, also across max pooling and reshapes.

    All inputs of a concatenation have one range, so whatever else reads these tensors gets that
    range too: a layer whose result is quantized with two scales would stay float.

    Before: each place has a quantizer of its own. After: places that read the same values have
    the same quantizer, if their descriptors and modes are equal, and ranges that are held.
    """
    slots_by_root: dict[int, list[str]] = {}
    for slot, value in values_read(plan, facts):
        if value.slot not in facts.weights:
            slots_by_root.setdefault(value.root, []).append(slot)
    for decision in plan.replaced:
        # One that cuts at 0 stands for the ReLU behind it, so it reads other values.
        if decision.output is not None and not _cuts(decision.output):
            for root in facts.results.get(decision.name, ()):
                slots_by_root.setdefault(root, []).insert(
                    0, f"{decision.name}.output_quantizer"
                )
    groups = [list(group) for group in plan.shared]
    read_by = _roots_read(slots_by_root)
    for group in _joined([*slots_by_root.values()]):
        kinds: dict[object, list[str]] = {}
        for slot in group:
            form = _descriptor(plan, facts, slot)
            if form is not None and form.granularity == PerTensor():
                # A target changes the form of planned quantizers, not of those in the code.
                is_fixed = facts.codes is not None and not _is_planned(
                    plan, facts, slot
                )
                kinds.setdefault((form, plan.modes.get(slot), is_fixed), []).append(
                    slot
                )
        parts = list(kinds.values())
        if facts.held:
            behind = _behind_concatenations(plan, facts)
            parts = [
                part for k in parts for part in apart(k, read_by, facts.held, behind)
            ]
        groups += [alike for alike in parts if len(alike) > 1]
    clipped = read_behind_clips(plan, facts).items()
    outputs = ([f"{layer}.output_quantizer", slot] for layer, slot in clipped)
    groups += [pair for pair in outputs if _has_output(plan, pair[0])]
    return replace(plan, shared=canonical_groups(_joined(groups)))


def _has_output(plan: Plan, slot: str) -> bool:
    """Return True for the quantizer of a result that the plan has."""
    decision = plan.decision(slot.rpartition(".")[0])
    return decision is not None and decision.output is not None


def _roots_read(slots_by_root: Mapping[int, list[str]]) -> dict[str, frozenset[int]]:
    """Return path of each quantizer -> the tensors that it reads."""
    roots: dict[str, set[int]] = {}
    for root, slots in slots_by_root.items():
        for slot in slots:
            roots.setdefault(slot, set()).add(root)
    return {slot: frozenset(read) for slot, read in roots.items()}


def _behind_concatenations(plan: Plan, facts: Facts) -> dict[str, list[str]]:
    """Return path of the quantizer of each concatenation -> those that read its result."""
    if facts.flow is None:
        return {}
    view = View(plan, facts)
    behind: dict[str, list[str]] = {}
    for call in view.flow.calls:
        if isinstance(call.module, Cat):
            slot = f"{call.name}.input_quantizer"
            behind.setdefault(slot, []).extend(_slots_reading(view, facts, call))
    return behind


def _slots_reading(view: View, facts: Facts, call: Call) -> Iterator[str]:
    """Yield the paths of the quantizers that read the result of a call, perhaps moved."""
    for reader in view.flow.consumers(call):
        if view.moves_elements(reader):
            yield from _slots_reading(view, facts, reader)
        elif view.is_quantized(reader):
            yield from (slot for slot in facts.inputs[reader.name] if slot)


def _cuts(descriptor: QuantDescriptor) -> bool:
    """Return True for codes that begin at 0, so that negative values become 0."""
    return descriptor.unsigned is True and descriptor.symmetric


def _descriptor(plan: Plan, facts: Facts, slot: str) -> QuantDescriptor | None:
    owner, _, name = slot.rpartition(".")
    decision = plan.decision(owner)
    if (
        name == "output_quantizer"
        and decision is not None
        and decision.output is not None
    ):
        return decision.output.replace(name=None)
    descriptor = facts.descriptors.get(slot)
    if descriptor is None and decision is not None:  # of one tensor of a concatenation
        descriptor = facts.descriptors.get(f"{owner}.input_quantizer")
    if descriptor is None or decision is None or decision.input is None:
        return descriptor
    # A pass of a target may have given it another width since the run.
    is_weight = slot in facts.weights or descriptor.num_bits == decision.input.num_bits
    return (
        descriptor
        if is_weight
        else descriptor.replace(num_bits=decision.input.num_bits)
    )


def _is_planned(plan: Plan, facts: Facts, slot: str) -> bool:
    """Return True for the quantizer of a decision, False for one in the code of the model."""
    owner, _, name = slot.rpartition(".")
    decision = plan.decision(owner)
    if decision is None or decision.reason == ALREADY:
        return False
    is_of_range = decision.ranges > 1 and name.startswith("input")
    return slot in facts.inputs[owner] or name == "output_quantizer" or is_of_range


def _joined(groups: list[list[str]]) -> list[list[str]]:
    """Return groups in which no slot is in two: groups that touch become one."""
    result: list[list[str]] = []
    for slots in groups:
        touching = [group for group in result if not set(group).isdisjoint(slots)]
        merged = list(dict.fromkeys(s for g in (*touching, slots) for s in g))
        result = [group for group in result if group not in touching] + [merged]
    return result


# --- results ------------------------------------------------------------------------------------


def quantize_results(
    plan: Plan, facts: Facts, *, linear: bool = False, returned: bool = False
) -> Plan:
    """Quantize the results of layers that something reads in float.

    Before: some results of quantized convolutions, or of linear layers with ``linear``, are read by
    operators that quantize nothing.
    After: these decisions have an ``output``; it is unsigned where a ReLU alone reads the result.
    Left alone are results that the model returns, that the head of a detector makes boxes of, or
    that a layer reads which stays float; and depthwise convolutions in front of a norm that cannot
    be folded, say, whose float kernel is the faster one there. With ``returned`` these have an
    ``output`` too, which chips without float kernels want.
    """
    if facts.flow is None:
        return plan
    view = View(plan, facts)
    layers = LAYERS if linear else CONVOLUTIONS
    calls: dict[str, list[Call]] = {}
    for call in view.flow.calls:
        if isinstance(call.module, layers):
            calls.setdefault(call.name, []).append(call)
    # A norm that is folded later holds the quantizer until then, if it can.
    fixed = {
        layer for layer, norm in facts.norms.items() if not norm.may_quantize_output
    }
    behind = read_behind_clips(plan, facts)
    rows = []
    for d in plan.decisions:
        if d.name in behind:
            d = replace(d, output=d.output or facts.descriptors[behind[d.name]])
        elif d.name not in fixed:
            d = _with_output(view, d, calls.get(d.name, []), returned)
        rows.append(d)
    return replace(plan, decisions=tuple(rows))


def read_behind_clips(plan: Plan, facts: Facts) -> dict[str, str]:
    """Return path of a layer -> a quantizer that reads its result behind a ReLU or the like.

    Beside ranges that are held, codes do not begin at 0 for all that. They leave a ReLU to itself,
    and the layer in front of it in float. By the same quantizer in front of the ReLU too, the layer
    gives codes, and those behind are equal: rounding is monotone, and leaves rounded values alone.
    """
    if facts.flow is None or not facts.held or _kernels_do("clips", facts):
        return {}
    view = View(plan, facts)
    found: dict[str, set[str]] = {}
    for call in view.flow.calls:
        if isinstance(call.module, CONVOLUTIONS) and view.is_quantized(call):
            slots = [*_slots_behind_clips(view, facts, call, False)]
            is_returned = call.index in view.flow.outputs
            found.setdefault(call.name, set()).update([""] if is_returned else slots)
    norms = facts.norms
    chosen = {}
    for layer, reading in found.items():
        held = [slot for slot in reading if slot in facts.held]
        is_one = len({facts.held[slot] for slot in held}) < 2
        is_fixed = layer in norms and not norms[layer].may_quantize_output
        if reading and "" not in reading and is_one and not is_fixed:
            chosen[layer] = min(held or reading)
    return chosen


def _slots_behind_clips(
    view: View, facts: Facts, call: Call, clipped: bool
) -> Iterator[str]:
    """Yield the quantizers that read a result behind a clip; "" for any other reader."""
    for reader in view.flow.consumers(call):
        if view.quantizes(reader):
            slots = [slot for slot in facts.inputs[reader.name] if slot is not None]
            if len(slots) == len(reader.operands):
                pairs = zip(slots, reader.operands, strict=True)
                slots = [slot for slot, index in pairs if index == call.index]
            for slot in slots:
                is_alone = slot in facts.held and facts.held[slot] is None
                from_zero = _cuts(facts.descriptors[slot])
                yield slot if clipped and not from_zero and not is_alone else ""
        elif clips(reader) or view.moves_elements(reader):
            behind = clipped or clips(reader)
            yield from _slots_behind_clips(view, facts, reader, behind)
        else:
            yield ""


def _with_output(
    view: View, decision: Decision, calls: list[Call], returned: bool
) -> Decision:
    if (
        decision.reason
        or decision.input is None
        or decision.weight is None
        or decision.output
    ):
        return decision
    needs = [_Readers(view, call) for call in calls]
    is_returned = any(n.returned for n in needs)
    if is_returned and not returned:
        return decision
    if not is_returned and not any(n.in_float for n in needs):
        return decision
    unsigned = all(n.after_relu for n in needs) and isinstance(
        decision.input.num_bits, int
    )
    if is_depthwise(calls[0].module) and not unsigned and not returned:
        return decision
    form = decision.input.replace(name=None)
    if unsigned:
        form = form.replace(unsigned=True, symmetric=True)
    elif form.symmetric:
        form = form.replace(unsigned=False)
    return replace(decision, output=form)


class _Readers:
    """What reads the result of one call of a layer.

    Attributes:
        in_float: something other than a quantizer reads it.
        returned: the model returns it, or the head of a detector or a float layer reads it.
        after_relu: a ReLU is all that reads it.
    """

    def __init__(self, view: View, call: Call) -> None:
        self._view = view
        self._flow = view.flow
        # Linear layers return floats as fast as codes.
        self._is_convolution = isinstance(call.module, CONVOLUTIONS)
        self.in_float = self.returned = False
        self.after_relu = self._is_before_relus(call)
        self._follow(call)

    def _is_before_relus(self, call: Call) -> bool:
        """Return True if ReLUs are all that reads a result, also behind what moves elements."""
        readers = self._flow.consumers(call)
        return bool(readers) and all(
            is_relu(reader)
            or (self._view.moves_elements(reader) and self._is_before_relus(reader))
            for reader in readers
        )

    def _follow(self, call: Call) -> None:
        if call.index in self._flow.outputs:
            self.returned = True
        readers = self._flow.consumers(call)
        for reader in readers:
            if self._view.quantizes(reader):
                self.in_float |= self._is_convolution and self._view.scales(
                    reader, call
                )
                continue
            if self._view.is_last_layer(reader):
                # The layer in front of it runs on integers, which wants its result quantized.
                self.in_float = True
            elif self._view.is_float_layer(reader) or reader.index in self._view.head:
                self.returned = True
            elif clips(reader) or self._view.moves_elements(reader):
                self._follow(reader)
            elif pads_with_zeros(reader) and self._is_before_convolutions(reader):
                continue
            else:
                self.in_float = True

    def _is_before_convolutions(self, call: Call) -> bool:
        """Return True if quantized convolutions are all that reads a result."""
        readers = self._flow.consumers(call)
        return bool(readers) and all(
            isinstance(reader.module, CONVOLUTIONS) and self._view.quantizes(reader)
            for reader in readers
        )


# --- codes --------------------------------------------------------------------------------------


def choose_grids(plan: Plan, facts: Facts) -> Plan:
    """Choose the form of the codes of activations, as the target has them.

    Before: all are as the rules say. After: a range that no rule fixes has a zero point where the
    target has them, which calibration sets; else, where the target has unsigned codes, calibration
    chooses the sign. Factors have signed codes instead where the target wants them. Codes are
    unsigned for good, in all places that share the range, where operators show that no value can be
    negative. A target without unsigned codes has signed ones where calibration would choose, and
    where a class has unsigned ones by itself. What a rule fixes stays. Scales have the type that
    files have, those of weights too.
    """
    codes = facts.codes
    if codes is None:
        return plan
    proved: dict[str, list[str]] = {}
    for slot in _without_negatives(plan, facts):
        form = _descriptor(plan, facts, slot)
        if form is not None and has_choice(form, codes):
            owner, _, name = slot.rpartition(".")
            proved.setdefault(owner, []).append(name.removesuffix("_quantizer"))
    signed = _signed_factors(plan, facts, proved) if codes.signed_factors else {}
    if not codes.unsigned:
        signed = _unsigned_by_class(plan, facts)
    rows = []
    for d in plan.decisions:
        if not d.reason:
            if d.input is not None and d.input.unsigned is not True:
                d = replace(d, signed=tuple(sorted(signed.get(d.name, ()))))
            forms = (in_codes(d.input, codes), d.weight, in_codes(d.output, codes))
            input, weight, output = (in_file(form, codes) for form in forms)
            unsigned = tuple(sorted(proved.get(d.name, ())))
            d = replace(d, input=input, weight=weight, output=output, unsigned=unsigned)
        rows.append(d)
    return replace(plan, decisions=tuple(rows))


def _signed_factors(
    plan: Plan, facts: Facts, proved: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return path of a module -> its slots of factors that would have a zero point.

    Not those that share their range with something else than factors.
    """
    codes = facts.codes
    assert codes is not None
    groups = {slot: group for group in plan.shared for slot in group}
    slots: dict[str, list[str]] = {}
    for path in sorted(facts.factors):
        owner, _, name = path.rpartition(".")
        slot = name.removesuffix("_quantizer")
        form = _descriptor(plan, facts, path)
        has_zero_point = (
            form is not None
            and has_choice(form, codes)
            and not in_codes(form, codes).symmetric
        )
        is_alone = facts.factors.issuperset(groups.get(path, ()))
        if has_zero_point and is_alone and slot not in proved.get(owner, ()):
            slots.setdefault(owner, []).append(slot)
    return slots


def ranges_by_channel(plan: Plan, facts: Facts) -> Plan:
    """Give the channels that depthwise convolutions read ranges of their own.

    Such a layer multiplies each channel by numbers of its own, so channels need no common scale,
    and one with a large range takes no codes from the others.

    Before: the input of a depthwise convolution has one range, whose codes are unsigned as no value
    there can be negative. After: it has one for each channel, where the target has such kernels and
    nothing else reads the tensor by the same quantizer.
    """
    codes = facts.codes
    if codes is None or not codes.by_channel:
        return plan
    together = {slot for group in plan.shared for slot in group}
    rows = []
    for d in plan.decisions:
        is_alone = f"{d.name}.input_quantizer" not in together
        is_open = d.input is not None and d.unsigned == ("input",) and is_alone
        if is_open and is_depthwise(facts.modules.get(d.name)):
            assert d.input is not None
            input = d.input.replace(axis=1, unsigned=True, symmetric=True)
            d = replace(d, input=input, unsigned=())
        rows.append(d)
    return replace(plan, decisions=tuple(rows))


def _unsigned_by_class(plan: Plan, facts: Facts) -> dict[str, list[str]]:
    """Return path of a module -> its slots of inputs with unsigned codes that are in use."""
    slots: dict[str, list[str]] = {}
    for owner, paths in facts.inputs.items():
        for path in paths:
            form = None if path is None else facts.descriptors.get(path)
            if path is None or form is None or plan.modes.get(path) == "off":
                continue
            if isinstance(form.num_bits, int) and form.unsigned is True:
                name = path.rpartition(".")[2].removesuffix("_quantizer")
                slots.setdefault(owner, []).append(name)
    return slots


def _without_negatives(plan: Plan, facts: Facts) -> list[str]:
    """Return the slots whose range holds no negative value for sure."""
    signs: dict[str, list[bool]] = {}
    for slot, value in values_read(plan, facts):
        signs.setdefault(slot, []).append(value.is_nonnegative)
    for d in plan.replaced:
        if d.output is not None:
            # What a ReLU reads may be negative.
            signs[f"{d.name}.output_quantizer"] = [False]
    together = {slot for group in plan.shared for slot in group}
    slots: list[str] = []
    for group in (*plan.shared, *((slot,) for slot in signs if slot not in together)):
        group_signs = [sign for slot in group for sign in signs.get(slot, ())]
        if group_signs and all(group_signs):
            slots += group
    return slots


def integer_biases(plan: Plan, facts: Facts) -> Plan:
    """Mark the layers whose biases the target's integer kernels add as int32.

    Before: all biases are float. After: ``bias`` is "int32" where a kernel runs on integers from
    end to end: input and weight are quantized, and so is the result, with one range, at once or
    behind an activation that codes which begin at 0 include. Files keep others in float, such as
    those in front of codes of 4 bits, which are clipped first, or linear layers on more than rows.
    Convolutions that a forward calls as functions, with the bias of a module, are like layers.
    """
    has_int32 = facts.codes is not None and facts.codes.int32_biases
    has_float = _kernels_do("layers alone", facts)
    if facts.flow is None or not (has_int32 or has_float):
        return plan
    results = _Results(plan, facts)
    rows = []
    for d in plan.decisions:
        if has_float:
            d = replace(d, from_zero=results.from_zero(d))
        behind = results.quantizers(d)
        if behind:
            # Of a layer that runs several times, each result may have a range of its own.
            one = behind[0] if results.have_one_range(behind) else ""
            is_layer = d.weight is not None and not results.is_call(d)
            bias = "int32" if is_layer and has_int32 else ""
            d = replace(d, bias=bias, rounded_by=one, awaits_fold=d.name in facts.norms)
        if has_int32 and results.adds_bias_in_call(d):
            d = replace(d, bias="int32")
        rows.append(d)
    return replace(plan, decisions=tuple(rows))


#: Why a quantized layer is computed in float whatever its result is.
NO_KERNEL = "the target has no integer kernel for it"


def float_kernels(
    plan: Plan,
    facts: Facts,
    *,
    to_codes: frozenset[str],
    never: frozenset[str] = frozenset(),
) -> Plan:
    """Mark the quantized layers that a target computes in float, with the values of their codes.

    Before: every layer with a quantized input and weight counts as one on integers. After: those
    have a ``float_kernel`` that are of a class for which there is ``never`` an integer kernel, and
    those of the classes ``to_codes`` whose result is not quantized, at once or behind what their
    kernels include. Calls of functions are like layers.
    """
    if facts.flow is None:
        return plan
    results = _Results(plan, facts)
    rows = []
    for d in plan.decisions:
        if not d.reason and d.input is not None and d.weight is not None:
            kinds = results.classes_of(d)
            if not kinds.isdisjoint(never):
                d = replace(d, float_kernel=NO_KERNEL)
            elif not kinds.isdisjoint(to_codes) and results.are_in_float(d):
                d = replace(d, float_kernel=RESULT_IN_FLOAT)
        rows.append(d)
    return replace(plan, decisions=tuple(rows))


#: Modules without a weight that integer kernels compute, beside averages.
_ON_INTEGERS = (Add, Mul, MatMul, ScaledDotProductAttention, nn.Sigmoid, nn.SiLU)
_CONVOLVE = frozenset(["conv1d", "conv2d", "conv3d"])
#: Functions with a weight that they compute, and that leave no float result between.
_CALLS_ON_INTEGERS = _CONVOLVE.union(["linear", "matmul", "mm", "addmm"])


@dataclass(frozen=True)
class _Kernel:
    """One call that an integer kernel computes.

    Attributes:
        reads: the call of what quantizes its operands.
        result: the call that gives its result, the same one for modules.
        is_call: it is a function with a weight.
    """

    reads: Call
    result: Call
    is_call: bool = False

    @property
    def adds_bias_in_float(self) -> bool:
        """True for a linear layer on more than rows, whose bias is added behind the kernel."""
        module = self.result.module
        is_linear = (
            isinstance(module, nn.Linear)
            if module is not None
            else _operator(self.result) == "linear"
        )
        has_none = isinstance(module, nn.Linear) and module.bias is None
        return is_linear and self.result.ndim != 2 and not has_none


def _kernels(view: View, facts: Facts) -> dict[str, list[_Kernel]]:
    """Return the calls that integer kernels compute, by the path of what has their quantizers."""
    kernels: dict[str, list[_Kernel]] = {}
    layers = (*LAYERS, *TRANSPOSED) if _kernels_do("transposed", facts) else LAYERS
    for call in filter(view.is_quantized, view.flow.calls):
        name = call.name
        kernel: _Kernel | None = None
        is_layer = isinstance(call.module, layers) and not call.functional
        is_layer &= not _has_groups_transposed(call.module)
        if not is_layer and _kernels_do("layers alone", facts):
            continue
        if is_layer or isinstance(call.module, _ON_INTEGERS) or _averages(view, call):
            kernel = _Kernel(call, call)
        elif isinstance(call.module, Tap) and not _is_in_graph(call.name, facts):
            kernel = _behind_tap(view, call)
        elif isinstance(call.module, TensorQuantizer):
            name, kernel = _behind_quantizer(view, call)
        if kernel is not None:
            kernels.setdefault(name, []).append(kernel)
    return kernels


def _kernels_do(what: str, facts: Facts) -> bool:
    """Return True for what the integer kernels of the target do; see :class:`Runtime`."""
    return what in facts.kernels


def _has_groups_transposed(module: nn.Module | None) -> bool:
    """Return True for a transposed convolution with groups."""
    return isinstance(module, TRANSPOSED) and module.groups > 1


def _averages(view: View, call: Call) -> bool:
    """Return True for a module that averages over windows, as kernels do."""
    row = None if call.module is None else operator_of(call.module)
    shape = view.flow.calls[call.inputs[0]].shape if call.inputs else None
    if row is None or shape is None or call.module is None:
        return False
    return windows_of_module(row.name, call.module, shape) is not None


def _is_in_graph(path: str, facts: Facts) -> bool:
    """Return True for a place in a graph of torch.fx, whose functions nothing stands for."""
    owner = facts.modules.get(path.rpartition(".")[0])
    return isinstance(owner, fx.GraphModule)


def _behind_tap(view: View, call: Call) -> _Kernel | None:
    """Return the function that reads the quantized operand of a tap."""
    readers = view.flow.consumers(call)
    if len(readers) != 1 or readers[0].module is not None or call.shape is None:
        return None
    reader = readers[0]
    name = _operator(reader)
    arguments = reader.arguments, reader.options
    is_computed = name == "sigmoid" or windows_of_call(name, *arguments, call.shape)
    return _Kernel(call, reader) if is_computed else None


def _behind_quantizer(view: View, call: Call) -> tuple[str, _Kernel | None]:
    """Return the function with a weight that reads a quantized input, and who has its quantizers.

    Products in which the weight is the first operand have no kernel.
    """
    owner, _, slot = call.name.rpartition(".")
    readers = view.flow.consumers(call)
    if slot != "input_quantizer" or len(readers) != 1:
        return owner, None
    reader = readers[0]
    operands = [view.flow.calls[index].name for index in reader.inputs]
    weight = f"{owner}.weight_quantizer" if owner else "weight_quantizer"
    is_right = operands[-2:] == [call.name, weight]
    is_computed = _operator(reader) in _CALLS_ON_INTEGERS and is_right
    return owner, _Kernel(call, reader, is_call=True) if is_computed else None


def _convolves(kernel: _Kernel, decision: Decision) -> bool:
    """Return True for a convolution: a layer, or a call, alone or last in a module's forward."""
    if decision.calls:
        return kernel.result.ends_in in _CONVOLVE
    if not kernel.is_call:
        return isinstance(kernel.result.module, CONVOLUTIONS)
    return _operator(kernel.result) in _CONVOLVE


class _Results:
    """Tells which layers run on integers from end to end in a file for ONNX Runtime."""

    def __init__(self, plan: Plan, facts: Facts) -> None:
        self._plan = plan
        self._facts = facts
        self._view = View(plan, facts)
        self._kernels = _kernels(self._view, facts)
        self._groups = {slot: group for group in plan.shared for slot in group}
        self._without_negatives = frozenset(_without_negatives(plan, facts))

    def have_one_range(self, slots: list[str]) -> bool:
        """Return True if the quantizers of some slots are one."""
        return len({self._groups.get(slot, (slot,)) for slot in slots}) == 1

    def is_call(self, decision: Decision) -> bool:
        """Return True for the quantizers of calls of a function with a weight."""
        return any(k.is_call for k in self._kernels.get(decision.name, ()))

    def quantizers(self, decision: Decision) -> list[str]:
        """Return what quantizes a layer's results; nothing unless all calls run on integers."""
        # A module that makes one call may compute more behind it.
        return [] if decision.calls else self._quantizers_of(decision)

    def adds_bias_in_call(self, decision: Decision) -> bool:
        """Return True for a module whose bias and weight calls of convolutions read on integers.

        It may be called itself too.
        """
        module = self._facts.modules.get(decision.name)
        kernels = self._kernels.get(decision.name, [])
        return (
            isinstance(getattr(module, "bias", None), nn.Parameter)
            and (bool(decision.calls) or self.is_call(decision))
            and all(_convolves(kernel, decision) for kernel in kernels)
            and bool(self._quantizers_of(decision))
        )

    def _quantizers_of(self, decision: Decision) -> list[str]:
        kernels = self._kernels.get(decision.name, [])
        d, w = decision.input, decision.weight
        if decision.reason or d is None or not kernels:
            return []
        fits = d.num_bits in _UP_TO_A_BYTE and d.granularity == PerTensor()
        of_weight = w is None or (
            w.num_bits in _UP_TO_A_BYTE and w.symmetric and not w.block_size
        )
        is_layer = isinstance(kernels[0].result.module, LAYERS)
        fits &= of_weight and (w is not None or not is_layer)
        if not fits or not all(
            self._view.quantizes(kernel.reads) for kernel in kernels
        ):
            return []
        if decision.output is not None:
            output_slots = [f"{decision.name}.output_quantizer"]
            return output_slots if decision.output.num_bits == _BYTE else []
        result_slots = []
        for kernel in kernels:
            slots = self._behind(kernel.result, False)
            # A kernel returns codes of one range. Where a result is read with two ranges, the
            # layer computes in float.
            if not slots or not self.have_one_range(slots) or self._is_float(kernel):
                return []
            result_slots += slots
        return result_slots

    def classes_of(self, decision: Decision) -> set[str]:
        """Return the class of a layer, and those that the functions of its calls stand for."""
        rows = (
            operator_named(kernel.result.name)
            for kernel in self._kernels.get(decision.name, [])
            if kernel.is_call
        )
        return {decision.class_name, *(row.layer for row in rows if row is not None)}

    def are_in_float(self, decision: Decision) -> bool:
        """Return True if a kernel of a layer gives a result that something reads in float."""
        kernels = self._kernels.get(decision.name, [])
        if decision.output is not None:
            return False
        if not kernels and not decision.name:
            return True  # The model is one layer, and returns its result.
        return any(not self._behind(kernel.result, False) for kernel in kernels)

    def from_zero(self, decision: Decision) -> tuple[str, ...]:
        """Return which codes of a layer a ReLU in front of them lets begin at 0."""
        kernels = self._kernels.get(decision.name, [])
        if decision.reason or not kernels:
            return ()
        found = {
            "input": all(self._reads_from_zero(kernel.result) for kernel in kernels),
            "result": all(self._is_cut(kernel.result) for kernel in kernels),
        }
        return tuple(name for name, begins in found.items() if begins)

    def _reads_from_zero(self, call: Call) -> bool:
        """Return True for a call that reads results of ReLUs, moved, joined or averaged at most."""
        sources = [self._view.flow.calls[index] for index in call.inputs]
        if not _joins(call):
            sources = sources[:1]
        return bool(sources) and all(map(self._is_from_zero, sources))

    def _is_from_zero(self, call: Call) -> bool:
        if _cuts_at_zero(call):
            return True
        keeps = self._keeps_codes(call) or _averages_function(call)
        return keeps and self._reads_from_zero(call)

    def _is_cut(self, call: Call) -> bool:
        """Return True for a result that ReLUs alone read, in front of codes that begin at 0."""
        readers = self._view.flow.consumers(call)
        return bool(readers) and all(
            self._is_read_from_zero(reader)
            if _cuts_at_zero(reader)
            else self._keeps_codes(reader) and self._is_cut(reader)
            for reader in readers
        )

    def _is_read_from_zero(self, call: Call) -> bool:
        """Return True unless values are joined with others, which may be negative."""
        joining = (r for r in self._view.flow.consumers(call) if self._keeps_codes(r))
        return all(
            self._reads_from_zero(reader) and self._is_read_from_zero(reader)
            for reader in joining
        )

    def _keeps_codes(self, call: Call) -> bool:
        """Return True for a call that moves elements, or takes the largest of windows."""
        moves = self._view.moves_elements(call) and not pads_with_zeros(call)
        return moves or self._moves_codes(call)

    def _moves_codes(self, call: Call) -> bool:
        """Return True for a max pool or a concatenation of codes, without a quantizer in front."""
        if not _kernels_do("layers alone", self._facts):
            return False
        if _joins(call):
            return True
        is_pool = (
            isinstance(call.module, nn.MaxPool2d) or _operator(call) == "max_pool2d"
        )
        return is_pool and not self._view.is_quantized(call)

    def _is_float(self, kernel: _Kernel) -> bool:
        """Return True for a linear layer whose bias the target adds in float, behind the kernel."""
        return kernel.adds_bias_in_float and not _kernels_do("rows", self._facts)

    def _behind(self, call: Call, activated: bool) -> list[str]:
        """Return the slots that read the result of a call, as bytes; nothing if others do too."""
        readers = self._view.flow.consumers(call)
        reading: list[str] = []
        moves = {
            self._view.moves_elements(r) and not pads_with_zeros(r) for r in readers
        }
        # Files quantize in front of a move that alone reads a result.
        is_mixed = len(moves) > 1 and not _kernels_do("moves", self._facts)
        if is_mixed or call.index in self._view.flow.outputs:
            return []
        for reader in readers:
            slots = self._fused(reader, call, activated)
            if not slots:
                return []
            reading += slots
        return reading

    def _fused(self, reader: Call, call: Call, activated: bool) -> list[str]:
        """Return the slots behind one reader of a result that a kernel includes."""
        if self._view.quantizes(reader) and self._view.scales(reader, call):
            return []
        if self._view.quantizes(reader):
            slots = self._slots(reader, call)
            return (
                slots if all(self._has_bytes(slot, activated) for slot in slots) else []
            )
        if clips(reader):
            return self._behind(reader, True)
        if self._view.moves_elements(reader) or pads_with_zeros(reader):
            return self._behind(reader, activated)
        return self._behind(reader, activated) if self._moves_codes(reader) else []

    def _slots(self, reader: Call, call: Call) -> list[str]:
        """Return the slots by which a module reads a result."""
        path = self._view.path(reader)
        # Products of attention and gates read other values.
        inside = self._facts.optional
        slots = [
            s for s in self._facts.inputs[path] if s is not None and s not in inside
        ]
        decision = self._plan.decision(path)
        if decision is not None and decision.ranges > 1:
            slots = [slot_of_range(slots[0], i) for i in range(decision.ranges)]
        operands = reader.operands
        if isinstance(reader.module, nn.MultiheadAttention):
            # The last of these slots reads what the module computes; masks have none.
            slots = slots[:3]
            operands = operands[:3]
        if isinstance(reader.module, nn.RNNBase):
            # The other slots read states, which the module computes.
            slots = slots[:1]
            operands = operands[:1]
        if len(slots) != len(operands):
            return slots
        return [s for s, i in zip(slots, operands, strict=True) if i == call.index]

    def _has_bytes(self, slot: str, activated: bool) -> bool:
        """Return True for a slot of 8 bits that includes an activation in front of it."""
        form = _descriptor(self._plan, self._facts, slot)
        if form is None or form.granularity != PerTensor() or form.num_bits != _BYTE:
            return False
        if not activated or _cuts(form) or slot in self._without_negatives:
            return True
        return _kernels_do("clips", self._facts)


# --- norms that are folded later, and those that are not ----------------------------------------


def float_before_norms(plan: Plan, facts: Facts, *, runtime: Runtime | None) -> Plan:
    """Mark the quantized layers that a target computes in float for a BatchNorm behind them.

    Before: each quantized layer without a ``float_kernel`` counts as one on integers. After: those
    have one of which a BatchNorm reads a result, as nothing will fold it, where the target has no
    integer kernel of both.
    """
    if facts.flow is None:
        return plan
    view = View(plan, facts)
    in_front = {
        view.path(call)
        for call in view.flow.calls
        if any(map(_is_norm, view.flow.consumers(call)))
    }
    rows = []
    for d in plan.decisions:
        stands_in_front = d.output is None and not in_front.isdisjoint(d.names)
        if stands_in_front and d.is_float_before_norm(runtime):
            d = replace(d, float_kernel=BEFORE_NORM)
        rows.append(d)
    return replace(plan, decisions=tuple(rows))


def _is_norm(call: Call) -> bool:
    return is_norm(call.module) or _operator(call) == "batch_norm"


def results_behind_norms(plan: Plan, facts: Facts) -> Plan:
    """Put the quantizer of a layer's result behind the BatchNorm that will be folded into it.

    Before: such a layer has an ``output``, as the folded model has. After: the BatchNorm has it,
    in a decision of its own, until :func:`torchq.fuse_` gives the quantizer to the layer.
    """
    moved: dict[str, str] = {}
    rows: list[Decision] = []
    for d in plan.decisions:
        norm = facts.norms.get(d.name)
        if norm is None or d.output is None or d.reason:
            rows.append(d)
            continue
        moved[f"{d.name}.output_quantizer"] = f"{norm.names[0]}.output_quantizer"
        behind = f"until it is folded into {d.name}"
        by = "result of a layer"
        rows.append(replace(d, output=None))
        rows.append(Decision(norm.names, norm.cls, output=d.output, by=by, note=behind))
    decisions = tuple(
        replace(d, rounded_by=moved.get(d.rounded_by, d.rounded_by)) for d in rows
    )
    groups = ([moved.get(slot, slot) for slot in group] for group in plan.shared)
    return replace(plan, decisions=decisions, shared=canonical_groups(groups))


#: What becomes of a plan for any target, before the passes of the target and behind them. The marks
#: of :func:`kernel_passes` are the last.
BEFORE_TARGET: tuple[PlanPass, ...] = (
    switches,
    drop_unreached,
    leave_out_unread,
    heads_in_float,
    last_layers_in_float,
    last_layers_in_16_bits,
)
BEHIND_TARGET: tuple[PlanPass, ...] = (share_ranges, choose_grids, ranges_by_channel)


def passes_for(runtime: Runtime | None) -> tuple[PlanPass, ...]:
    """Return the planning passes behind conversion, in order."""
    of_target = runtime.planning if runtime else ()
    return (*BEFORE_TARGET, *of_target, *BEHIND_TARGET, *kernel_passes(runtime))


def kernel_passes(runtime: Runtime | None) -> tuple[PlanPass, ...]:
    """Return the passes that mark what kernels do with the quantizers of a plan, in order."""
    of_target = runtime.judging if runtime else ()
    judge_norms = partial(float_before_norms, runtime=runtime)
    return (integer_biases, *of_target, judge_norms, results_behind_norms)
