"""The plan of a quantized model: which tensors are quantized and how, as a value."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError, InputError
from torchq.graph import KINDS
from torchq.nn.calls.routes import CallSite
from torchq.nn.integer_kernel import evaluation_line
from torchq.runtime import PRODUCTS, Runtime, runtime_with
from torchq.swap import schema
from torchq.swap.share import Part, Share, Work
from torchq.utils import child_path, table

#: The classes whose products happen in the forward of the module around them.
_PRODUCTS = frozenset(["MatMul", "ScaledDotProductAttention"])
#: Classes whose kernels multiply integers, also where they give a float result.
_FLOAT_RESULTS = frozenset(["Linear", "MultiheadAttention", *_PRODUCTS])
#: The operators whose operands have slots of their own: a Tap quantizes the first operand alone.
_SEVERAL = frozenset(KINDS.values()) - {"Tap"}
#: The start of the note about a layer whose weight alone is quantized, because of the target.
FLOAT_INPUT = "its input stays float"
#: The reasons that are the user's own choice.
_CHOSEN = frozenset(["excluded", "not in include", "the rule has no descriptor for it"])
#: What a plan for no target says of itself.
_PORTABLE = (
    "no target: portable; one may add operators and choose codes: "
    "torchq.plan(model, target=...)"
)
#: What reports say of an operator about which calibration has not decided yet.
OPTIONAL = "optional until calibrated"
#: Why a module that has quantizers does not get more.
ALREADY = "quantized already"


def canonical_groups(groups: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """Return groups of paths in one order, whatever order they were found in."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


#: Class of a layer -> what it is in ONNX files.
_OPERATORS_OF_FILES = {
    "Conv1d": "Conv",
    "Conv2d": "Conv",
    "Conv3d": "Conv",
    "ConvTranspose1d": "ConvTranspose",
    "ConvTranspose2d": "ConvTranspose",
    "ConvTranspose3d": "ConvTranspose",
    "Linear": "Gemm",
}


@dataclass(frozen=True)
class Factors:
    """Factors by which a layer divides the channels that it reads, as calibration chose them.

    The quantizers of its input and weight hold them; see
    :mod:`torchq.workflow.linear_factors`.

    Attributes:
        alpha: the share of the difficulty that moved to the weights.
        gain: by how many dB the error of its result fell.
        by: who decided it.
    """

    alpha: float
    gain: float
    by: str = "calibrate"

    def __str__(self) -> str:
        return (
            f"channels of input divided by factors (SmoothQuant, alpha {self.alpha:g}): error of "
            f"the result {self.gain:.1f} dB less; by {self.by}"
        )


@dataclass(frozen=True)
class EvenChannels:
    """Factors that make the channels of a depthwise layer's input as large as each other.

    The quantizers of its input and weight hold them; files and kernels have them in the layer that
    makes the channels. See :mod:`torchq.workflow.even_channels`.

    Attributes:
        source: path of the layer that makes the channels.
        gain: by how many dB the error of the rounded input fell.
        by: who decided it.
    """

    source: str
    gain: float
    by: str = "calibrate"

    def __str__(self) -> str:
        return (
            f"channels of input multiplied by factors, which files have in {self.source}: error "
            f"of the input {self.gain:.1f} dB less; by {self.by}"
        )


@dataclass(frozen=True)
class Decision:
    """What happens to one module; it holds no module and no tensor, so it fits a file.

    Attributes:
        names: every dotted path of the module; ``("",)`` for the root. An operator that becomes a
            child, such as ``quant_add``, has the path of the child.
        cls: the qualified name of its float class.
        input: how its inputs are quantized, or None.
        weight: how its weights are quantized, or None.
        output: how its result is quantized, or None.
        calls: the calls in its own forward that are quantized.
        ranges: of a concatenation, how many ranges its inputs have.
        unsigned: the slots whose codes are unsigned whatever calibration sees, as no value there
            can be negative. Others with ``unsigned="auto"`` are settled by calibration.
        signed: the slots whose codes are signed, as the target has no others, where those of the
            class are unsigned: a softmax.
        bias: "int32" if the target adds its bias as an integer, so that the forward rounds it.
        rounded_by: the path of the quantizer that its kernel rounds the result for, with such a
            bias, or where it adds codes.
        from_zero: ``"input"`` and ``"result"`` where a ReLU in front of these codes lets kernels
            that add float biases store them from 0.
        awaits_fold: a BatchNorm behind it is to be folded; ``bias`` and ``rounded_by`` hold from
            then on.
        one_scale: its weight has one scale, as the kernels of the target take no more.
        optional: the target added it beside layers, where it buys time and never accuracy, so that
            calibration may leave it in float.
        noise: of an optional one, the noise that it alone adds to the outputs of the model, over
            their power, as calibration estimates it; None before that.
        left_float: the slots that calibration turned off, as they cost too much at the outputs.
        factors: those that its quantizers hold, where calibration chose them.
        even: the same of a depthwise layer.
        adopted: another maker chose its quantizers and their ranges, for good.
        float_kernel: why the target computes it in float all the same, with the values of its
            codes; empty where it has an integer kernel.
        reason: why it stays float; empty where it is quantized.
        by: the pattern of the rule, or the planning pass, that decided; empty for none.
        note: what else there is to know about it.
    """

    names: tuple[str, ...]
    cls: str
    input: QuantDescriptor | None = None
    weight: QuantDescriptor | None = None
    output: QuantDescriptor | None = None
    calls: tuple[CallSite, ...] = ()
    ranges: int = 1
    unsigned: tuple[str, ...] = ()
    signed: tuple[str, ...] = ()
    bias: str = ""
    rounded_by: str = ""
    from_zero: tuple[str, ...] = ()
    awaits_fold: bool = False
    one_scale: bool = False
    optional: bool = False
    noise: float | None = None
    left_float: tuple[str, ...] = ()
    factors: Factors | None = None
    even: EvenChannels | None = None
    adopted: bool = False
    float_kernel: str = ""
    reason: str = ""
    by: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """The first dotted path."""
        return self.names[0]

    @property
    def class_name(self) -> str:
        """The name of the float class without its module."""
        return self.cls.rpartition(".")[2]

    @property
    def descriptors(self) -> dict[str, QuantDescriptor]:
        """Slot of a rule (``"input"``, ``"weight"``, ``"output"``) -> how it is quantized."""
        slots = {"input": self.input, "weight": self.weight, "output": self.output}
        return {slot: value for slot, value in slots.items() if value is not None}

    @property
    def is_container(self) -> bool:
        """True for a module that is converted because something inside is quantized."""
        return not (self.reason or self.input or self.weight or self.output)

    @property
    def is_norm(self) -> bool:
        """True for a BatchNorm whose result is quantized, for the layer in front of it."""
        return self.output is not None and self.input is None and self.weight is None

    @property
    def has_float_input(self) -> bool:
        """True if a target leaves the input of the module float, so that it computes in float."""
        return self.note.startswith(FLOAT_INPUT)

    @property
    def outcome(self) -> tuple[Any, ...]:
        """The part that changes a model, without who decided it and why."""
        slots = (self.input, self.weight, self.output)
        rounding = (
            self.unsigned,
            self.signed,
            self.bias,
            self.rounded_by,
            self.from_zero,
            self.awaits_fold,
            self.one_scale,
        )
        return (self.name, self.cls, *slots, self.calls, self.ranges, *rounding)

    def is_float_before_norm(self, runtime: Runtime | None) -> bool:
        """Return True for a layer on integers which a runtime has in float if a BatchNorm follows.

        Args:
            runtime: None for files that are for no runtime in particular.
        """
        is_quantized = self.input is not None and self.weight is not None
        if self.reason or self.float_kernel or not is_quantized:
            return False
        operator = _OPERATORS_OF_FILES.get(self.class_name)
        return operator in (PRODUCTS if runtime is None else runtime.float_before_norms)

    def in_float(self, reason: str, by: str) -> Decision:
        """Return the decision to leave the module float."""
        return Decision(self.names, self.cls, reason=reason, by=by, note=self.note)

    def __str__(self) -> str:
        if self.reason:
            return f"SKIPPED: {self.reason}"
        if self.left_float:
            return f"left in float; {self.note}"
        descriptors, unsigned = self.descriptors, self.unsigned
        if unsigned == ("input",) and self.class_name not in _SEVERAL:
            descriptors["input"] = descriptors["input"].replace(
                unsigned=True, symmetric=True
            )
            unsigned = ()
        sentence = ", ".join(f"{slot} {value}" for slot, value in descriptors.items())
        if self.ranges > 1:
            sentence += f" ({self.ranges} ranges)"
        if unsigned:
            sentence += f", unsigned {' and '.join(unsigned)}"
        if self.signed:
            sentence += f", signed {' and '.join(self.signed)}"
        if self.bias:
            sentence += (
                f", bias {self.bias}{' once folded' if self.awaits_fold else ''}"
            )
        if self.calls:
            kinds_called = [site.kind for site in self.calls if not site.is_unseen]
            kinds = ", ".join(dict.fromkeys(kinds_called))
            sentence = (
                f"{sentence}, at its call of {kinds}"
                if sentence
                else f"calls of {kinds}"
            )
        sentence = sentence or "calls its children"
        if self.optional and self.noise is None:
            sentence = f"{sentence}; {OPTIONAL}"
        for held in filter(None, (self.factors, self.even)):
            sentence = f"{sentence}; {held}"
        if self.float_kernel:
            sentence = f"{sentence}; computed in float, as {self.float_kernel}"
        return f"{sentence}; {self.note}" if self.note else sentence


@dataclass(frozen=True)
class Operators:
    """The operators of one forward that children of the module compute.

    Attributes:
        cls: the qualified name of the float class of the module.
        sites: the place of an operator (in the source, or a node of the graph) -> the child.
    """

    cls: str
    sites: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """Everything that is decided about a model; :func:`torchq.plan` makes it.

    A plan is data: it compares equal to another one, survives ``copy``, ``pickle`` and, by
    :meth:`to_dict`, a file. It is what :func:`torchq.quantize_` carries out and returns, and what
    :func:`torchq.save` stores. ``print`` it for the verdict, and its :meth:`table` for all rows.

    Attributes:
        decisions: one for each module that is quantized or that one could expect to be, and for
            each operator that becomes a module.
        operators: path of a module -> the operators in its forward that become children.
        placed: path -> how a quantizer that the author of the model placed quantizes.
        shared: the paths of quantizers that are one, with one range.
        modes: path -> mode of the quantizers that do anything else than quantize: those that
            stay off, say.
        fusions: what :func:`torchq.fuse_` did before.
        target: the runtime that it is for, or None.
        settings: those of the runtime that are others than its usual ones.
        recipe: the name of the rules.
        work: what each module computes: multiply-adds with an example, else its weights.
        forwards: path of a module with operators or calls that are known by their places in its
            code -> a hash of that code.
        check: what the comparison of the converted model, all quantizers off, with the float one
            gave: "equal"; "off" where it was not wanted; "not repeatable: ..." with the module
            that differs from itself; "" where there was no example.
        todo: what is to be done with the model before it is used, in a sentence. It is not kept.
    """

    decisions: tuple[Decision, ...] = ()
    operators: Mapping[str, Operators] = field(default_factory=dict)
    placed: Mapping[str, QuantDescriptor] = field(default_factory=dict)
    shared: tuple[tuple[str, ...], ...] = ()
    modes: Mapping[str, str] = field(default_factory=dict)
    # Files are read by these types: Any takes what a later check looks into.
    fusions: tuple[Mapping[str, Any], ...] = ()
    target: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    work: Work | None = None
    forwards: Mapping[str, str] = field(default_factory=dict)
    check: str = field(default="", compare=False)
    timing: str = field(default="", compare=False)
    todo: str = field(default="", compare=False)

    def __hash__(self) -> int:
        # Its other parts are mappings; plans that differ in these alone may have equal hashes.
        return hash((self.decisions, self.shared, self.target, self.recipe))

    @property
    def replaced(self) -> tuple[Decision, ...]:
        """The modules that are quantized."""
        return tuple(d for d in self.decisions if not d.reason)

    @property
    def skipped(self) -> tuple[Decision, ...]:
        """The modules that stay float, each with its ``reason``."""
        return tuple(d for d in self.decisions if d.reason)

    @property
    def share(self) -> Share | None:
        """How much of the model is quantized; None where nothing says so."""
        if self.work is None:
            return None
        operators = (d for d in self.operator_rows() if not d.left_float)
        products = (d for d in operators if d.class_name in _PRODUCTS)
        owners = {name.rpartition(".")[0] for d in products for name in d.names}
        decision_by_name = {
            d.name: d for d in sorted(self.decisions, key=lambda d: not d.reason)
        }
        # Weights of modules without a decision may be no factors at all.
        counted = [
            n for n in self.work.amounts if self.work.measured or n in decision_by_name
        ]
        return self.work.share(
            (
                part
                for n in counted
                for part in self._parts(n, decision_by_name, n in owners)
            ),
            _CHOSEN,
        )

    def _parts(
        self, path: str, decisions: Mapping[str, Decision], has_products: bool
    ) -> Iterator[Part]:
        """Yield the parts of a module's work: each of its quantized calls, and the rest.

        With ``has_products`` the rest is that of operators, which are quantized.
        """
        assert self.work is not None
        decision = decisions.get(path)
        rest = self.work.amounts[path]
        sites = decision.calls if decision is not None else ()
        amount_by_place = self.work.calls.get(path, {})
        places = [site for site in sites if site.site in amount_by_place]
        for site in places:
            amount = amount_by_place[site.site]
            holder = decisions.get(child_path(path, site.holder))
            yield Part(path, amount, "" if holder is None else _reason(holder))
            rest -= amount
        if places and rest > 0:
            yield Part(path, rest, "" if has_products else _IN_FORWARD)
        elif not places:
            reason = _reason(decision) or self._float_state(path)
            yield Part(path, rest, "" if has_products else reason)

    def _float_state(self, path: str) -> str:
        """Return why a recurrent layer computes in float whose hidden states are not quantized."""
        start = child_path(path, "hidden_")
        has_float = any(
            slot.startswith(start) and mode == "off"
            for slot, mode in self.modes.items()
        )
        return _FLOAT_STATE if has_float else ""

    @cached_property
    def _by_path(self) -> dict[str, Decision]:
        decision_by_path: dict[str, Decision] = {}
        for decision in sorted(
            self.decisions, key=lambda d: (bool(d.reason), d.is_container)
        ):
            for name in decision.names:
                decision_by_path.setdefault(name, decision)
        return decision_by_path

    def decision(self, path: str) -> Decision | None:
        """Return the decision about the module at ``path``, or None."""
        return self._by_path.get(path)

    def operator_rows(self) -> Iterator[Decision]:
        """Yield the decisions about the operators that become children."""
        children = {
            child_path(path, child)
            for path, entry in self.operators.items()
            for child in entry.sites.values()
        }
        return (d for d in self.replaced if d.name in children)

    def in_float(self, reasons: Mapping[str, str], by: str) -> Plan:
        """Return the plan in which some modules stay float.

        Args:
            reasons: path -> why.
            by: who decided it; see :attr:`Decision.by`.
        """
        if not reasons:
            return self
        gone = {d.name for d in self.replaced if d.name in reasons}
        decisions = tuple(
            d.in_float(reasons[d.name], by) if d.name in gone and not d.reason else d
            for d in self.decisions
        )
        operators = {}
        for path, entry in self.operators.items():
            remaining = {
                s: c for s, c in entry.sites.items() if child_path(path, c) not in gone
            }
            if remaining:
                operators[path] = replace(entry, sites=remaining)
        modes = {
            p: mode
            for p, mode in self.modes.items()
            if p.rpartition(".")[0] not in gone
        }
        calling = {name for d in decisions if d.calls for name in d.names}
        forwards = {
            p: h for p, h in self.forwards.items() if p in operators or p in calling
        }
        # What stays float has no quantizer that could share its range.
        paths = {path for d in self.replaced if d.name in gone for path in d.names}
        groups = [
            [slot for slot in group if slot.rpartition(".")[0] not in paths]
            for group in self.shared
        ]
        return replace(
            self,
            decisions=decisions,
            operators=operators,
            modes=modes,
            shared=canonical_groups(group for group in groups if len(group) > 1),
            forwards=forwards,
        )

    def outcome(self) -> Plan:
        """Return the plan without what changes nothing in a model: reasons, notes, shares."""
        unexplained: dict[str, Any] = {"by": "", "note": "", "optional": False}
        unexplained |= {"noise": None, "left_float": (), "factors": None}
        unexplained["even"] = None
        unexplained["float_kernel"] = ""
        rows = (replace(d, names=d.names[:1], **unexplained) for d in self.replaced)
        decisions = tuple(sorted(rows, key=lambda d: d.names))
        same: dict[str, Any] = {"modes": {}, "target": None, "recipe": "", "work": None}
        same["settings"] = {}
        same |= {"check": "", "timing": "", "todo": ""}
        return replace(self, decisions=decisions, **same)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data, which :meth:`from_dict` reads.

        ==========  ==============================================================================
        version     the version of this schema, 3
        decisions   a list; see :class:`Decision`. What is empty is left out.
        operators   path of a module -> its class, and ``sites``; see :class:`Operators`
        forwards    path of a module -> the hash of its code. Left out where there is none.
        check       left out where it is empty
        timing      left out where it is empty
        settings    those of the target that are others than its usual ones; left out without any
        work        what each module computes, as :class:`torchq.swap.share.Work` has it, or None
        ==========  ==============================================================================

        The other entries are the attributes of a plan.
        """
        named = {name: schema.plain(getattr(self, name)) for name in (*_PARTS, *_MAYBE)}
        return {
            "version": VERSION,
            **{k: v for k, v in named.items() if v or k in _PARTS},
        }

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """Return the plan that :meth:`to_dict` described.

        Raises:
            ConfigError: The data are damaged, or of another version.
        """
        entries = schema.read(Mapping[str, Any], data, "record")
        version = entries.pop("version", None)
        if type(version) is not int:
            raise schema.damaged("version", version, str(VERSION))
        if version != VERSION:
            raise ConfigError(
                f"load: got a record of version {version}; expected {VERSION}. Quantize the float "
                "model with the recipe that it had, and get its tensors by "
                "model.load_state_dict(torch.load(path, weights_only=True)['state_dict']); "
                "calibrate again what was quantized for a target"
            )
        if set(entries) - set(_MAYBE) != set(_PARTS):
            raise schema.damaged(
                "record", sorted(entries), f"the entries {', '.join(_PARTS)}"
            )
        plan: Plan = schema.read(cls, entries, "record")
        for where, got, expected in plan.problems():
            raise schema.damaged(where, got, expected)
        return replace(plan, shared=canonical_groups(plan.shared))

    def problems(self) -> Iterator[tuple[str, Any, str]]:
        """Yield what no plan says although its types allow it: where, what it says, what it may."""
        return _problems(self)

    def explain(self, path: str) -> str:
        """Return what is decided about ``path`` - of a module or a quantizer -, by whom and why.

        Raises:
            InputError: ``path`` is no string.
        """
        if not isinstance(path, str):
            raise InputError(
                f"Plan.explain: got a {type(path).__name__}; expected the path of a module or a "
                "quantizer. Paths are those of model.named_modules()"
            )

        def concerns(slot: str) -> bool:
            return path in (slot, slot.rpartition(".")[0])

        lines = []
        for d in self.decisions:
            if not {path, path.rpartition(".")[0]}.isdisjoint(d.names):
                by = f"; decided by {d.by}" if d.by else ""
                lines.append(f"{path or '(root)'}: {d.class_name}: {d}{by}")
        for group in self.shared:
            for p in filter(concerns, group):
                lines.append(
                    f"{p}: one range with {', '.join(o for o in group if o != p)}"
                )
        lines += [f"{p}: {mode}" for p, mode in self.modes.items() if concerns(p)]
        return "\n".join(lines) or f"{path or '(root)'}: nothing is decided about it"

    def table(self) -> str:
        """Return every decision as a row of a table, with the verdict below."""
        return self._rows("")

    def _rows(self, remark: str) -> str:
        rows = [
            (" = ".join(d.names) or "(root)", d.class_name, str(d), d.by)
            for d in self.decisions
        ]
        ending = f"{remark}{self.verdict()}"
        return table([("module", "type", "what", "by"), *rows], ending)

    def verdict(self) -> str:
        """Return how much is quantized, in one line."""
        rows = list(self.operator_rows())
        operators = len(rows)
        left_float = sum(bool(d.left_float) for d in rows)
        containers = sum(d.is_container for d in self.decisions)
        norms = sum(d.is_norm for d in self.replaced)
        layers = len(self.replaced) - operators - containers - norms
        in_float = sum(bool(d.float_kernel) for d in self.replaced)
        of_layers = f" ({in_float} of them computed in float)" if in_float else ""
        counts = [f"{layers} quantized{of_layers}"]
        if operators:
            of_these = f", {left_float} of them left in float" if left_float else ""
            target = self.target or "a target"
            counts.append(f"{operators} operators for {target}{of_these}")
        if norms:
            counts.append(f"{norms} results behind BatchNorm")
        if containers:
            counts.append(f"{containers} containers")
        counts.append(f"{len(self.skipped)} skipped")
        recipe = f", recipe {self.recipe}" if self.recipe else ""
        share = f"; {self.share}{self._float_products()}" if self.share else ""
        timing = f"; {self.timing}" if self.timing else ""
        todo = f"; {self.todo}" if self.todo else ""
        known = f"{self._evaluation()}{self._doubt()}{todo}"
        return f"{', '.join(counts)}{recipe}{share}{timing}{known}"

    def _float_products(self) -> str:
        """Return what part of the work is products that the target has no integer kernel for."""
        runtime = runtime_with(self.target, self.settings)
        if runtime is None or runtime.placement is None or self.share is None:
            return ""
        by_what = self.share.float_work.items()
        part = sum(p for what, p in by_what if what.endswith(f": {_IN_FORWARD}"))
        if not part or "matmul" in runtime.placement.operators:
            return ""
        return f" ({part:.1%} are products as in attention, which {runtime.name} computes in float)"

    def _evaluation(self) -> str:
        """Return whether a forward without gradients computes what the target does."""
        runtime = runtime_with(self.target, self.settings)
        if runtime is None:
            return ""
        has_kernel = any(
            d.rounded_by or (d.input is not None and d.class_name in _FLOAT_RESULTS)
            for d in self.replaced
        )
        on_integers = has_kernel and runtime.arithmetic is not None
        return f"; {evaluation_line(runtime.name, on_integers=on_integers)}"

    def _doubt(self) -> str:
        """Return what is not proved about the conversion."""
        if self.check == "off":
            return "; not compared with the float model (check=False)"
        return (
            f"; cannot be compared with the float model: {self.check}"
            if self._is_random
            else ""
        )

    @property
    def _is_random(self) -> bool:
        return self.check.startswith("not repeatable")

    def __str__(self) -> str:
        """Return a screen: the rows, or how many are alike, with the verdict in the last line."""
        if len(self.decisions) <= _SCREEN:
            return self._rows(self._portable())
        alike: dict[str, list[Decision]] = {}
        for d in sorted(self.decisions, key=lambda d: bool(d.reason)):
            alike.setdefault(_in_short(d), []).append(d)
        rows = [("what", "modules", "where")]
        rows += [
            (what, _kinds_of(decisions), _stages_of(decisions))
            for what, decisions in alike.items()
        ]
        hint = "Each module: plan.table(); one: plan.explain(path)"
        if len(rows) > _SCREEN:
            hint = f"{len(rows) - _SCREEN} more kinds of decisions. {hint}"
        return table(rows[:_SCREEN], f"{hint}\n{self._portable()}{self.verdict()}")

    def _portable(self) -> str:
        """Return a line about what naming a target would change; "" where one is named."""
        says = self.target is None and self.recipe and self.replaced
        return f"{_PORTABLE}\n" if says else ""


def _in_short(decision: Decision) -> str:
    """Return a decision in the words that concatenations of other numbers of tensors share.

    A DenseNet has one of another number in each layer.
    """
    if decision.ranges == 1:
        return str(decision)
    text = str(replace(decision, unsigned=(), signed=()))
    return text.replace(f"({decision.ranges} ranges)", "(a range each)")


def _kinds_of(decisions: Sequence[Decision]) -> str:
    counts = Counter(d.class_name for d in decisions)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common(_SHOWN))


def _stages_of(decisions: Sequence[Decision]) -> str:
    """Return the parts of a network that hold modules, and how many each of them holds."""
    if len(decisions) <= _SHOWN:
        return ", ".join(d.name or "(root)" for d in decisions)
    depth = 1 if len({d.name.partition(".")[0] for d in decisions}) > 1 else 2
    stages = Counter(".".join(d.name.split(".")[:depth]) or "(root)" for d in decisions)
    texts = [name if n == 1 else f"{name} ({n})" for name, n in stages.items()]
    more = f", {len(texts) - _STAGES} more" if len(texts) > _STAGES else ""
    return ", ".join(texts[:_STAGES]) + more


#: The rows that a printed plan has at most, and the modules and stages that a row names.
_SCREEN, _SHOWN, _STAGES = 16, 3, 6


def _reason(decision: Decision | None) -> str:
    """Return why the work of a module stays float; "" where it is quantized."""
    if decision is None:
        return _IN_FORWARD
    if decision.reason:
        return "" if decision.reason == ALREADY else decision.reason
    if decision.has_float_input:
        return decision.note
    if decision.float_kernel:
        return decision.float_kernel
    is_quantized = decision.input or decision.weight or decision.calls
    return "" if is_quantized else _IN_FORWARD


#: Why a recurrent layer with quantized inputs and weights stays float.
_FLOAT_STATE = "its hidden state is float, and with it each step"
#: Why work of a module stays float that has no operators of its own.
_IN_FORWARD = "products in its forward"
VERSION = 3
#: The attributes of a plan in a file, in order.
_PARTS = (
    *("target", "recipe", "fusions", "decisions"),
    *("operators", "placed", "shared", "modes", "work"),
)
#: Those that are left out where they are empty.
_MAYBE = ("forwards", "check", "settings", "timing")


_MODES = ("off", "observe", "quantize", "observe+quantize")
#: The largest number of ranges that a concatenation can have.
_MOST_RANGES = 256


def _problems(plan: Plan) -> Iterator[tuple[str, object, str]]:
    """Yield what no plan says although its types allow it: where, what it says, what it may."""
    for number, d in enumerate(plan.decisions):
        if not d.names:
            yield f"decisions[{number}].names", [], "a list of one or more paths"
        if not 1 <= d.ranges <= _MOST_RANGES:
            yield (
                f"decisions[{number}].ranges",
                d.ranges,
                f"a number from 1 to {_MOST_RANGES}",
            )
        yield from _problems_of_calibration(f"decisions[{number}]", d)
        if d.calls and d.output is not None:
            yield f"decisions[{number}]", "output", "none for function calls"
    for path, entry in plan.operators.items():
        children = list(entry.sites.values())
        if not all(map(_is_name, children)):
            yield f"operators[{path!r}]", children, "names that are Python identifiers"
        if len(set(children)) != len(children):
            yield f"operators[{path!r}]", children, "every child once"
    for path, mode in plan.modes.items():
        if mode not in _MODES:
            yield f"modes[{path!r}]", mode, f"one of {', '.join(_MODES)}"
    if any(len(group) < 2 for group in plan.shared):
        yield "shared", plan.shared, "lists of two or more paths"
    yield from () if plan.work is None else _problems_of_work(plan.work)


def _problems_of_calibration(
    where: str, d: Decision
) -> Iterator[tuple[str, object, str]]:
    if d.noise is not None and not 0 <= d.noise < float("inf"):
        yield f"{where}.noise", d.noise, "a number >= 0"
    if d.factors is not None and not 0 <= d.factors.alpha <= 1:
        yield f"{where}.factors.alpha", d.factors.alpha, "0 to 1"


def _is_name(child: str) -> bool:
    """Return True for what can become an attribute in generated code."""
    return child.isidentifier() and child.isascii() and not keyword.iskeyword(child)


def _problems_of_work(work: Work) -> Iterator[tuple[str, object, str]]:
    for path, amount in work.amounts.items():
        if not 0 <= amount < float("inf"):
            yield f"work.amounts[{path!r}]", amount, "a number >= 0"
    if work.rows < 1:
        yield "work.rows", work.rows, "a whole number >= 1"
    if set(work.amounts) != set(work.classes):
        yield "work", sorted(work.classes), "a class for each amount"
