"""The heads of detectors: what turns their last maps into boxes and scores stays float."""

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from torch.nn.modules.conv import _ConvNd

from torchq.graph import Call, Flow, effects_of, operator_named, operator_of
from torchq.nn import Cat
from torchq.swap.facts import Facts
from torchq.swap.plan import Decision, Plan

#: The dimensions of rows of boxes or scores: batch, positions and numbers.
_ROWS = 3


def behind_last_layers(flow: Flow) -> frozenset[int]:
    """Return the indices of the calls behind a detector's last layers; none for other networks.

    No other layer reads the results of a last layer, not even behind other calls. A detector has
    several, and turns the maps of some of these into rows, one for each position. A classifier has
    one last layer, networks for segmentation return maps, and what pools a map before it becomes a
    row keeps no positions. A convolution of probabilities with fixed weights, which gives distances
    (Li et al., Generalized Focal Loss, 2020), counts as a call behind the last layers.
    """
    precedes = _precedes_layers(flow)
    last = {
        c.index for c in flow.calls if _is_layer(flow, c) and c.index not in precedes
    }
    behind: set[int] = set()
    for call in flow.calls:
        reads_head = any(i in last or i in behind for i in call.inputs)
        if reads_head and call.index not in precedes and call.index not in last:
            behind.add(call.index)
    of_maps = sum(isinstance(flow.calls[i].module, _ConvNd) for i in last)
    if of_maps < 2 or not any(_lists_positions(flow, flow.calls[i]) for i in behind):
        return frozenset()
    return frozenset(behind)


def _precedes_layers(flow: Flow) -> set[int]:
    """Return the calls whose results a layer reads, also behind other calls."""
    before_layers: set[int] = set()
    for call in reversed(flow.calls):
        readers = flow.consumers(call)
        if any(
            _is_layer(flow, reader) or reader.index in before_layers
            for reader in readers
        ):
            before_layers.add(call.index)
    return before_layers


def _is_layer(flow: Flow, call: Call) -> bool:
    """Return True for a module with weights that is no fixed sum of probabilities."""
    module = call.module
    if module is None or not any(p.dim() > 1 for p in module.parameters()):
        return False
    sums = isinstance(module, _ConvNd) and module.out_channels == 1
    return not (
        sums and any(_gives_probabilities(flow, flow.calls[i]) for i in call.inputs)
    )


def _gives_probabilities(flow: Flow, call: Call) -> bool:
    """Return True for a softmax, also behind what moves its elements."""
    row = (
        operator_of(call.module)
        if call.module is not None
        else operator_named(call.name)
    )
    if row is not None and row.name == "softmax":
        return True
    moves = call.module is None and "move" in effects_of(call.name)
    return moves and any(_gives_probabilities(flow, flow.calls[i]) for i in call.inputs)


def _lists_positions(flow: Flow, call: Call) -> bool:
    """Return True for a reshape of maps to rows."""
    moves = isinstance(call.module, nn.Flatten) or "move" in effects_of(call.name)
    source = flow.calls[call.inputs[0]].shape if call.inputs else None
    if not moves or source is None or call.shape is None or len(call.shape) != _ROWS:
        return False
    return len(source) > _ROWS and math.prod(source[-2:]) > 1


#: Who decided that what stands behind the last layers of a detector stays float.
BY = "detection head"
_REASON = (
    "a detector's boxes and scores are made of it, which one range cannot hold; a rule that names "
    "it quantizes it"
)


def heads_in_float(plan: Plan, facts: Facts) -> Plan:
    """Leave in float what makes boxes and scores of the last maps of a detector.

    A range that boxes of hundreds of pixels share with scores up to 1 leaves the scores two codes
    or three, and a rounded distance moves a box. What a rule selects by other means than the type
    is left alone.

    Before: operators behind the last layers are quantized like others. After: they are float, as
    is a fixed convolution of probabilities; the last layers are quantized still.
    """
    if facts.flow is None:
        return plan
    head = behind_last_layers(facts.flow)
    called = [call for call in facts.flow.calls if call.module is not None]
    elsewhere = {call.name for call in called if call.index not in head}
    behind = {call.name for call in called} - elsewhere
    movable = {
        d.name for d in plan.replaced if _by_kind(d, facts) and not d.is_container
    }
    return plan.in_float(dict.fromkeys(sorted(behind & movable), _REASON), BY)


#: The largest part of the multiply-adds that the last layers of a detector stay float for.
_SMALL = 0.03
#: The smallest part that a percentage with one decimal shows.
_SHOWN = 0.0005


def bare_last_layers(flow: Flow) -> frozenset[str]:
    """Return the paths of a detector's last layers whose results only move to its outputs.

    These are the convolutions of :func:`behind_last_layers` that reshapes and concatenations alone
    read: no norm and no activation stands behind them. Detectors made of transformers have linear
    layers there, two or more of which are joined.
    """
    precedes = _precedes_layers(flow)
    last = [c for c in flow.calls if _is_layer(flow, c) and c.index not in precedes]
    is_detector = bool(behind_last_layers(flow)) or _joins_rows(flow, last)
    if not is_detector:
        return frozenset()
    bare: set[str] = set()
    others = {call.name for call in flow.calls if call not in last}
    for call in last:
        is_plain = isinstance(call.module, (_ConvNd, nn.Linear))
        readers = flow.consumers(call)
        if is_plain and readers and all(map(_arranges, readers)):
            bare.add(call.name)
        else:
            others.add(call.name)
    return frozenset(bare - others)


def _joins_rows(flow: Flow, last: list[Call]) -> bool:
    """Return True if rows of two last linear layers end in one concatenation."""
    sources: dict[int, set[str]] = {
        call.index: {call.name}
        for call in last
        if isinstance(call.module, nn.Linear)
        and call.shape is not None
        and len(call.shape) >= _ROWS
    }
    for call in flow.calls:
        names = {name for i in call.inputs for name in sources.get(i, ())}
        if names and call.index not in sources:
            sources[call.index] = names
            if len(names) > 1 and _is_cat(call):
                return True
    return False


def _is_cat(call: Call) -> bool:
    if call.module is not None:
        return isinstance(call.module, Cat)
    row = operator_named(call.name)
    return row is not None and row.name == "cat"


def _arranges(call: Call) -> bool:
    """Return True for a reshape, and for a concatenation."""
    if call.module is not None:
        return isinstance(call.module, nn.Flatten) or _is_cat(call)
    return "move" in effects_of(call.name) or _is_cat(call) or call.name == "stack"


def last_layers_in_float(plan: Plan, facts: Facts) -> Plan:
    """Leave the last bare layers of a detector in float, where they are a small part of its work.

    A rounded weight moves every box, and every score, of a class; that of other layers is one of
    many. So do the makers of detectors: most of the accuracy for a small part of the time. What a
    rule selects by other means than the type is left alone, like what ``include`` names by its
    path, and so are targets without float kernels.

    Before: the last layers are quantized like others. After: they are float, or those of them with
    the least work, which together have at most 3 % of the multiply-adds.
    """
    if facts.flow is None or not facts.computes_floats or plan.work is None:
        return plan
    last = bare_last_layers(facts.flow)
    movable = [d.name for d in plan.replaced if d.name in last and _by_kind(d, facts)]
    small, part = _smallest(movable, plan.work.amounts, facts.flow)
    if not small:
        return plan
    share = f"{part:.1%}" if part >= _SHOWN else "little"
    reason = (
        f"a detector's boxes or scores are its results, for {share} of the multiply-adds with "
        "the other last layers; a rule that names it quantizes it"
    )
    return plan.in_float(dict.fromkeys(small, reason), BY)


def _by_kind(decision: Decision, facts: Facts) -> bool:
    """Return True where nobody asked for this module in particular."""
    return decision.by.startswith("type:") and decision.name not in facts.included


def _smallest(
    names: list[str], amounts: Mapping[str, float], flow: Flow
) -> tuple[list[str], float]:
    """Return the layers with the least work that are a small part of all, and what part.

    Those that the model computes its answers of come first: a second head whose results it returns
    as they are, beside such answers, is there for the loss of a training.
    """
    calls = {call.name: call for call in flow.calls}
    total = max(1.0, sum(amounts.values()))
    small: list[str] = []
    part = 0.0

    def order(name: str) -> tuple[bool, float]:
        return not _is_read_on(flow, calls[name]), amounts.get(name, 0.0)

    for name in sorted(names, key=order):
        more = part + amounts.get(name, 0.0) / total
        if more <= _SMALL:
            small.append(name)
            part = more
    return small, part


def _is_read_on(flow: Flow, call: Call) -> bool:
    """Return True where something is computed of a result, behind what arranges it."""
    return any(
        not _arranges(reader) or _is_read_on(flow, reader)
        for reader in flow.consumers(call)
    )


#: Widths of the codes of activations: what a rule says, and what the last layers get.
_BYTE, _WIDE = 8, 16


def last_layers_in_16_bits(plan: Plan, facts: Facts) -> Plan:
    """Let the last bare layers of a detector read and return 16 bits where nothing is float.

    A code of 8 bits is pixels wide where boxes are as large as the image.

    Before: the last layers read and return 8 bits like others. After: they have 16 bits, on a
    target without float kernels that has such codes. What a rule selects by other means than the
    type is left alone.
    """
    codes = facts.codes
    if facts.flow is None or facts.computes_floats or codes is None:
        return plan
    if _WIDE not in codes.widths:
        return plan
    last = bare_last_layers(facts.flow)
    decisions = (
        _in_16_bits(d) if d.name in last and _by_kind(d, facts) else d
        for d in plan.decisions
    )
    return replace(plan, decisions=tuple(decisions))


def _in_16_bits(decision: Decision) -> Decision:
    if decision.reason or decision.input is None or decision.input.num_bits != _BYTE:
        return decision
    note = "16 bits, as a detector's boxes or scores are its results"
    form = decision.input.replace(num_bits=_WIDE)
    return replace(decision, input=form, note=decision.note or note)
