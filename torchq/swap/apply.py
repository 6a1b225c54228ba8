"""Carrying out a plan, reading it from a model, and undoing it. Nothing is decided here."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError
from torchq.fusion import apply_fusion_record_, fusion_record
from torchq.fusion.unfolded import keeps_norm
from torchq.nn import (
    QuantModule,
    TensorQuantizer,
    convert_,
    revert_,
    share_quantizers_,
    shared_groups,
)
from torchq.nn.calls.modules import (
    CHANGED,
    OperatorOwner,
    RoutedModule,
    forward_digest,
    route_,
)
from torchq.nn.calls.routes import CallSite
from torchq.nn.convert import (
    float_class_of,
    float_name,
    unchanged_on_error,
    unparametrized,
)
from torchq.nn.integer_kernel import IntegerKernel
from torchq.nn.modules.frozen_batchnorm import thawed
from torchq.nn.modules.operators import OPERATORS, QuantCat, stand_in
from torchq.runtime import Runtime, remember_target, runtime_with
from torchq.swap.plan import ALREADY, Decision, Operators, Plan, canonical_groups
from torchq.swap.same_results import (
    EQUAL,
    NOT_REPEATABLE,
    Outcome,
    ResultsDiffer,
    calls_of,
    first_difference,
    refusal,
    unrepeatable_module,
)
from torchq.swap.share import BEFORE_NORM
from torchq.utils import (
    child_path,
    device_of,
    modules_with_names,
    network_of,
    qualified_name,
    set_submodule,
    twin_of,
)

#: The attribute of a model that holds its plan, for what its modules do not tell: who decided
#: what, and why modules stay float. What is quantized and how is read from the modules.
_ATTRIBUTE = "_torchq_plan"


def class_name(module: nn.Module) -> str:
    """Return the qualified name of the float class of a module, without parametrizations."""
    return qualified_name(thawed(unparametrized(float_class_of(module))))


def public_path(path: str) -> str:
    """Return the path of a quantizer without the leading underscore of legacy layers."""
    parent, dot, leaf = path.rpartition(".")
    is_legacy = leaf.startswith("_") and leaf.endswith("_quantizer")
    return f"{parent}{dot}{leaf[1:]}" if is_legacy else path


# --- reading ------------------------------------------------------------------------------------


def plan_of(model: nn.Module) -> Plan:
    """Return the plan that describes ``model`` as it is now.

    What is quantized and how is read from the modules, so it is true whatever was changed by hand.
    Who decided it, and why other modules stay float, is what :func:`torchq.quantize_` or
    :func:`torchq.load` left with the model.

    Args:
        model: any module; left unchanged.

    Returns:
        The plan; that of a float model has no decisions.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> torchq.quantize_(model) == plan_of(model)
        True
    """
    model = network_of(model)
    current = as_it_is(model)
    for prefix, plan in reversed(recorded_plans(model)):
        current = replace(
            current, decisions=_explained(current.decisions, plan.decisions, prefix)
        )
    whole: Plan = vars(model).get(_ATTRIBUTE, current)
    kept_fields: dict[str, Any] = {
        "target": whole.target,
        "settings": whole.settings,
        "recipe": whole.recipe,
        "work": whole.work,
    }
    runtime = runtime_with(whole.target, whole.settings)
    decisions = _with_norms_behind(model, current.decisions, whole.fusions, runtime)
    return replace(current, **kept_fields, check=whole.check, decisions=decisions)


def _with_norms_behind(
    model: nn.Module,
    decisions: tuple[Decision, ...],
    planned: Sequence[Mapping[str, Any]],
    runtime: Runtime | None,
) -> tuple[Decision, ...]:
    """Return decisions that know which BatchNorms were folded since planning, and which refused.

    Args:
        model: as it is now.
        decisions: as they were planned.
        planned: what had been fused by then.
        runtime: that the model is for.
    """
    folded = {
        path
        for entry in fusion_record(model)
        if entry not in planned
        for path in entry.get("layers", ())
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    rows = []
    for d in decisions:
        layer = modules.get(d.name)
        if d.float_kernel == BEFORE_NORM and d.name in folded:
            d = replace(d, float_kernel="")
        stays = layer is not None and keeps_norm(layer) and d.output is None
        if stays and d.is_float_before_norm(runtime):
            d = replace(d, float_kernel=BEFORE_NORM)
        rows.append(d)
    return tuple(rows)


def recorded_plans(model: nn.Module) -> list[tuple[str, Plan]]:
    """Return the plans that :func:`quantize_` and :func:`load` left, with the paths of their parts.

    They say what was decided, whatever was changed by hand since; see :func:`plan_of`.
    """
    return [
        (path, vars(module)[_ATTRIBUTE])
        for path, module in model.named_modules()
        if _ATTRIBUTE in vars(module)
    ]


def _explained(
    actual: tuple[Decision, ...], kept: tuple[Decision, ...], prefix: str
) -> tuple[Decision, ...]:
    """Return decisions in the order, and with the explanations, of those that were kept."""
    start = f"{prefix}." if prefix else ""
    unexplained = {d.name: d for d in actual if not d.reason}
    result = []
    for old in kept:
        names = tuple(f"{start}{name}" if name else prefix for name in old.names)
        now = (
            unexplained.pop(names[0], None)
            if not old.reason
            else unexplained.get(names[0])
        )
        if old.reason and now is None:
            result.append(replace(old, names=names))
        elif not old.reason and now is not None:
            result.append(_explained_alone(now, old))
    others = [d for d in actual if d.reason or d.name in unexplained]
    return (*result, *others)


def _explained_alone(now: Decision, old: Decision) -> Decision:
    """Return a decision with the explanation of the kept one, if it is the same still.

    Folding a BatchNorm into a layer gives it the quantizer of a result, wakes what awaited the
    fold, and separates the channels of a weight with one scale.
    """
    as_planned = replace(
        now,
        output=old.output,
        bias=old.bias,
        rounded_by=old.rounded_by,
        from_zero=old.from_zero,
        awaits_fold=old.awaits_fold,
    )
    if as_planned.outcome[1:] == old.outcome[1:]:
        return replace(
            now,
            optional=old.optional,
            noise=old.noise,
            left_float=old.left_float,
            factors=old.factors,
            even=old.even,
            adopted=old.adopted,
            float_kernel=old.float_kernel,
            by=old.by,
            note=old.note,
        )
    if as_planned.weight is None or as_planned.weight.axis is None:
        return now
    separated = replace(as_planned, weight=as_planned.weight.replace(axis=None))
    if separated.outcome[1:] != old.outcome[1:]:
        return now
    note = "its one weight scale became one per output channel, as a BatchNorm was folded into it"
    explained = replace(now, float_kernel=old.float_kernel, by=old.by, note=note)
    return replace(explained, adopted=old.adopted)


def as_it_is(model: nn.Module) -> Plan:
    """Return what the modules of a model tell."""
    rows = []
    operators = {}
    owned: set[int] = set()
    for names, module in modules_with_names(model):
        if not isinstance(module, QuantModule):
            continue
        owned |= _own_children(module)
        if isinstance(module, OperatorOwner) and module.replacements:
            operators[names[0]] = Operators(
                class_name(module), dict(module.replacements)
            )
        calls = module.torchq_calls if isinstance(module, RoutedModule) else ()
        if calls or not (isinstance(module, OperatorOwner) and module.is_container):
            rows.append(_decision_of(names, module, calls))
    placed, modes = {}, {}
    for path, quantizer in quantizer_slots(model):
        if id(quantizer) not in owned:
            placed[path] = quantizer.given_descriptor
            owned.add(id(quantizer))
        if quantizer.mode != "quantize":
            modes[path] = quantizer.mode
    fusions = tuple(fusion_record(model))
    plan = Plan(tuple(rows), operators, placed, shared_paths(model), modes, fusions)
    return replace(plan, forwards=forward_digests(model, plan))


def shared_paths(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the paths of quantizers that are one."""
    return canonical_groups([map(public_path, group) for group in shared_groups(model)])


def _decision_of(
    names: tuple[str, ...], module: QuantModule, calls: tuple[CallSite, ...]
) -> Decision:
    """Return the decision that one quantized module shows."""
    # A plan says that these codes are unsigned.
    fixed = _slots_that_keep_signs(module)
    slots: Any = module.rule_descriptors()
    return Decision(
        names,
        class_name(module),
        **slots,
        calls=calls,
        ranges=module.ranges if isinstance(module, QuantCat) else 1,
        unsigned=fixed[True],
        signed=(*_signed_slots(module, slots.get("input")), *fixed[False]),
        bias=module.bias_format or module.after_fold[0],
        rounded_by=module.rounded_by or module.after_fold[1],
        from_zero=module.from_zero,
        awaits_fold=any(module.after_fold),
        one_scale=module.one_weight_scale,
    )


def _slots_that_keep_signs(module: nn.Module) -> dict[bool, tuple[str, ...]]:
    """Return the slots with unsigned codes (True) and with signed ones (False) for good."""
    kept: dict[bool, list[str]] = {True: [], False: []}
    for name, quantizer in module.named_children():
        if isinstance(quantizer, TensorQuantizer) and quantizer.keeps_sign:
            is_unsigned = quantizer.descriptor.unsigned is True
            kept[is_unsigned].append(name.removesuffix("_quantizer"))
    return {sign: tuple(sorted(slots)) for sign, slots in kept.items()}


def _signed_slots(
    module: QuantModule, input: QuantDescriptor | None
) -> tuple[str, ...]:
    """Return the slots with signed codes whose class has unsigned ones for inputs of a rule."""
    if input is None or input.unsigned is True:
        return ()
    by_class = type(module).slot_descriptors(input, None)
    signed = []
    for slot, descriptor in by_class.items():
        quantizer = getattr(module, f"{slot}_quantizer", None)
        if descriptor is None or not isinstance(quantizer, TensorQuantizer):
            continue
        if descriptor.unsigned is True and quantizer.descriptor.unsigned is False:
            signed.append(slot)
    return tuple(sorted(signed))


def _own_children(module: nn.Module) -> set[int]:
    """Return the ids of the children that conversion gave to a module, its quantizers."""
    has_own = isinstance(module, QuantModule) and not module.is_container
    return {id(child) for child in module.children()} if has_own else set()


def quantizer_slots(model: nn.Module) -> Iterator[tuple[str, TensorQuantizer]]:
    """Yield every quantizer under each of its paths."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TensorQuantizer):
            yield public_path(path), module


# --- carrying out -------------------------------------------------------------------------------


def apply_(model: nn.Module, plan: Plan, example: object = None) -> None:
    """Fuse and quantize ``model`` as ``plan`` says, in place.

    A model that is quantized in another way is made float first, so that afterwards it is
    quantized as the plan says and in no other way. A call that fails changes nothing.

    Args:
        model: the architecture that the plan was made for, float or quantized.
        plan: what :func:`torchq.plan` returned, or :meth:`Plan.from_dict`.
        example: the arguments for one call of the model. With it the converted model, every
            quantizer off, is compared with the float model, as :func:`quantize_` does.

    Raises:
        QuantizationError: The model is not the one that the plan was made for, or the converted
            one computes something else than the float one.
        FuseError: The model cannot be fused as the plan says.
        ConfigError: The plan contradicts itself.
    """
    for where, got, expected in plan.problems():
        raise ConfigError(
            f"apply_: {where}: got {got!r}; expected {expected}. Use what torchq.plan returned"
        )
    model = network_of(model)
    runtime = runtime_with(plan.target, plan.settings)
    with unchanged_on_error(model):
        if as_it_is(model).outcome() == plan.outcome():
            _set_modes(model, plan)
        else:
            restore_(model)
            apply_fusion_record_(model, plan.fusions)
            if len(fusion_record(model)) != len(plan.fusions):
                raise QuantizationError(
                    f"load: {qualified_name(type(model))}: is fused; expected an unfused model, as "
                    "the one that was saved is not fused in this way. Build the model again"
                )
            if example is None:
                carry_out_(model, plan)
            else:
                plan = carry_out_compared_(model, plan, example)
        vars(model)[_ATTRIBUTE] = plan
        remember_target(model, runtime)


def carry_out_compared_(model: nn.Module, plan: Plan, example: object) -> Plan:
    """Quantize a float model as a plan says; return the plan with what the comparison gives.

    Raises:
        QuantizationError: The converted model computes something else; the model is float still.
    """
    outcome = Outcome.of(model, example)
    try:
        with unchanged_on_error(model):
            carry_out_(model, plan)
            outcome.check(model, example)
            return replace(plan, check=EQUAL)
    except ResultsDiffer as error:
        problem = str(error)
    unrepeatable = unrepeatable_module(model, example, outcome)
    if unrepeatable is None:
        before = calls_of(model, example, outcome)
        with tried(model, plan):
            after = calls_of(model, example, outcome)
        raise refusal(first_difference(before, after), problem, plan, model)
    carry_out_(model, plan)
    return replace(plan, check=f"{NOT_REPEATABLE}: {unrepeatable or '(root)'}")


def carry_out_(model: nn.Module, plan: Plan) -> None:
    """Quantize the float modules that a plan is about, in place."""
    _build(model, plan)
    _check_placed(model, plan)
    _set_modes(model, plan)
    name_quantizers(model)
    _expect_ranges(model)
    _give_to_kernels(model, plan)


def _expect_ranges(model: nn.Module) -> None:
    """Give ranges of weights their dimensions where calls of a forward read them.

    A layer does so itself; what holds quantizers of calls does not know the weight.
    """
    for module in model.modules():
        if isinstance(module, QuantModule):
            module.expect_ranges()


def _give_to_kernels(model: nn.Module, plan: Plan) -> None:
    """Tell layers which kernel of the target computes them, where its formulas are known."""
    runtime = runtime_with(plan.target, plan.settings)
    if runtime is None or runtime.arithmetic is None:
        return
    known = dict(model.named_modules(remove_duplicate=False))
    for decision in plan.replaced:
        module = known.get(decision.name)
        result = known.get(decision.rounded_by) if decision.rounded_by else None
        if isinstance(module, QuantModule) and isinstance(
            result, (TensorQuantizer, NoneType)
        ):
            module.integer_kernel = IntegerKernel(runtime.name, result)


def _build(model: nn.Module, plan: Plan) -> None:
    _check_forwards(model, plan)
    _add_operators(model, plan)
    _convert_modules(model, plan)
    for paths in plan.shared:
        share_quantizers_(model, paths)


def forward_digests(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Return the hashes of the forwards whose operators or calls a plan names by their places."""
    paths = [*plan.operators, *(d.name for d in plan.replaced if d.calls)]
    digest_by_path = {path: forward_digest(model.get_submodule(path)) for path in paths}
    return dict(sorted(digest_by_path.items()))


def _check_forwards(model: nn.Module, plan: Plan) -> None:
    """Raise QuantizationError where a forward is not the one that the plan was made for."""
    modules = dict(model.named_modules())
    for path, digest in plan.forwards.items():
        module = modules.get(path)
        if module is not None and forward_digest(module) != digest:
            raise QuantizationError(
                f"{path or '(root)'}: {class_name(module)}: {CHANGED}"
            )


def keep_plan(model: nn.Module, plan: Plan) -> None:
    """Leave a plan with its model, and with it what an earlier one says of modules in it."""
    before: Plan = vars(model).get(_ATTRIBUTE, Plan())
    earlier = {d.name: d for d in before.replaced}
    rows = tuple(
        earlier.get(d.name, d) if d.reason == ALREADY else d for d in plan.decisions
    )
    vars(model)[_ATTRIBUTE] = replace(plan, decisions=rows)


def keep_as_plan(model: nn.Module, plan: Plan) -> None:
    """Leave a plan with its model in place of the earlier one."""
    vars(model)[_ATTRIBUTE] = plan


@contextmanager
def tried(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Let ``model`` be quantized inside a ``with`` block, with modes as conversion makes them."""
    try:
        with unchanged_on_error(model):
            _build(model, plan)
            yield
            raise _Tried
    except _Tried:
        pass


class _Tried(Exception):
    """The end of a trial, which undoes it."""


def _add_operators(model: nn.Module, plan: Plan) -> None:
    """Give modules their children that stand for operators, and make their forwards call them."""
    modules = dict(model.named_modules())
    for path, entry in plan.operators.items():
        owner = _find(modules, path, entry.cls)
        for child in entry.sites.values():
            decision = plan.decision(child_path(path, child))
            cls = None if decision is None else OPERATORS.get(decision.class_name)
            problem = f"there is no operator for {child}; expected a decision about it"
            if hasattr(owner, child):
                problem = (
                    f"has an attribute {child} already; expected a module without it"
                )
            if cls is None or hasattr(owner, child):
                raise QuantizationError(
                    f"{path or '(root)'}: {problem}. Load into the architecture that was saved"
                )
            owner.add_module(child, stand_in(cls).train(owner.training))
        if not any(d.calls for d in plan.replaced if path in d.names):
            route_(owner, entry.sites)
    for decision in plan.replaced:
        if decision.calls and decision.is_container:
            owner = _find(modules, decision.name, decision.cls)
            sites = _sites(plan, decision)
            route_(owner, sites, decision.calls)


def _sites(plan: Plan, decision: Decision) -> Mapping[str, str] | None:
    entries = [
        plan.operators[name] for name in decision.names if name in plan.operators
    ]
    return entries[0].sites if entries else None


def _convert_modules(model: nn.Module, plan: Plan) -> None:
    module_by_path = dict(model.named_modules(remove_duplicate=False))
    rows = [d for d in plan.replaced if not (d.calls and d.is_container)]
    modules = [_find(module_by_path, d.name, d.cls) for d in rows]
    places: dict[int, set[tuple[int, str]]] = {}
    for path, module in module_by_path.items():
        parent, _, leaf = path.rpartition(".")
        places.setdefault(id(module), set()).add((id(module_by_path[parent]), leaf))
    for decision, module in zip(rows, modules, strict=True):
        has_state = bool((*module.parameters(), *module.buffers(), *module.children()))
        if len(places[id(module)]) > 1 and not has_state:
            # One object without parameters in several places: each place gets a copy.
            module = twin_of(module)
            set_submodule(model, decision.name, module)
        # Modules without tensors of their own, such as additions, have quantizers there.
        with device_around(model, decision.name) or nullcontext():
            convert_as(module, decision, _sites(plan, decision))


def convert_as(
    module: nn.Module, decision: Decision, operators: Mapping[str, str] | None = None
) -> None:
    """Convert one module as a decision says, in place."""
    if decision.calls:
        slots = {"input": decision.input, "weight": decision.weight}
        route_(module, operators, decision.calls, **slots)
    else:
        convert_(module, **decision.descriptors)
    if isinstance(module, QuantCat) and decision.ranges > 1:
        module.separate_ranges_(decision.ranges)
    for slot in decision.unsigned:
        quantizer: Any = getattr(module, f"{slot}_quantizer", None)
        chosen = ("unsigned", "amin")  # what a quantizer has whose codes are not fixed
        if not any(getattr(quantizer, name, None) is not None for name in chosen):
            raise QuantizationError(
                f"{decision.name}: the codes of {slot} are unsigned in the plan; expected a "
                "quantizer there that may be. Load into the architecture that was saved"
            )
        quantizer.keep_unsigned()
    for slot in decision.signed:
        quantizer = getattr(module, f"{slot}_quantizer", None)
        if not isinstance(quantizer, TensorQuantizer):
            raise QuantizationError(
                f"{decision.name}: the codes of {slot} are signed in the plan; expected a "
                "quantizer there. Load into the architecture that was saved"
            )
        quantizer.keep_signed()
    if isinstance(module, QuantModule):
        _mark(module, decision)
        module.one_weight_scale = decision.one_scale


def _mark(module: QuantModule, decision: Decision) -> None:
    """Tell a module how the kernels of the target add its bias and round its result."""
    marks = (decision.bias, decision.rounded_by)
    nothing = ("", "")
    module.from_zero = decision.from_zero
    module.after_fold = marks if decision.awaits_fold else nothing
    module.bias_format, module.rounded_by = nothing if decision.awaits_fold else marks


def carry_marks_(model: nn.Module, plan: Plan) -> None:
    """Let the modules of a quantized model round as a plan says, in place."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for decision in plan.replaced:
        module = modules.get(decision.name)
        if isinstance(module, QuantModule):
            _mark(module, decision)
    _give_to_kernels(model, plan)


def device_around(model: nn.Module, name: str) -> torch.device | None:
    """Return the device of the nearest module around ``name`` with tensors; None for none."""
    parents = name.split(".")[:-1]
    paths = [".".join(parents[:count]) for count in range(len(parents), -1, -1)]
    devices = (device_of(model.get_submodule(path)) for path in paths)
    return next((device for device in devices if device is not None), None)


def _find(found: Mapping[str, nn.Module], path: str, expected: str) -> nn.Module:
    module = found.get(path)
    if module is None or not _is_of_class(module, expected):
        got = "no such module" if module is None else class_name(module)
        raise QuantizationError(
            f"{path or '(root)'}: got {got}; expected {expected}. Load into the architecture that "
            "was saved"
        )
    return module


def _is_of_class(module: nn.Module, expected: str) -> bool:
    """Return True if the class of a module has this name, or had it in a script of its own.

    A class of the script that is run, ``__main__.Net``, is ``train.Net`` for who imports it.
    """
    name = class_name(module)
    return (
        name == expected
        or _is_from_script(name, expected)
        or _is_from_script(expected, name)
    )


def _is_from_script(name: str, elsewhere: str) -> bool:
    of_script = "__main__."
    return name.startswith(of_script) and elsewhere.endswith(
        "." + name.removeprefix(of_script)
    )


def _check_placed(model: nn.Module, plan: Plan) -> None:
    owned = {key for module in model.modules() for key in _own_children(module)}
    for path, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and id(module) not in owned:
            expected = plan.placed.get(public_path(path))
            if module.given_descriptor != expected:
                raise QuantizationError(
                    f"{path}: quantizes as {module.given_descriptor}; expected "
                    f"{expected or 'none here'}. Load into the architecture that was saved"
                )


def _set_modes(model: nn.Module, plan: Plan) -> None:
    slots = dict(quantizer_slots(model))
    for path in (*plan.modes, *plan.placed):
        if path not in slots:
            raise QuantizationError(
                f"{path}: is no quantizer of the model; expected the same quantizers. Load into "
                "the architecture that was saved"
            )
    for path, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            module.mode = plan.modes.get(public_path(path), "quantize")


def name_quantizers(model: nn.Module) -> None:
    """Tell every quantizer its dotted path, for error texts."""
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            module.name = name


def restore_(model: nn.Module, example: object = None) -> tuple[str, ...]:
    """Make every quantized module of ``model`` float again, in place: all of them, or none.

    This undoes :func:`quantize_`. Ranges are dropped; weights stay as they are now. Quantizers that
    the author of the model placed stay.

    Args:
        model: any module; changed in place.
        example: the arguments for one call of the model. With it the float model is compared with
            the quantized one, every quantizer off: equal bit for bit.

    Returns:
        The paths of the modules that were quantized.

    Raises:
        QuantizationError: The float model computes something else; the model stays quantized.
    """
    model = network_of(model)
    restored = []
    outcome = None if example is None else Outcome.of(model, example)
    with unchanged_on_error(model):
        for name, module in list(model.named_modules()):
            vars(module).pop(_ATTRIBUTE, None)
            if isinstance(module, QuantModule):
                revert_(module)
                restored.append(name)
        if outcome is not None:
            _check_restored(model, example, outcome)
    remember_target(model, None)
    return tuple(restored)


def _check_restored(model: nn.Module, example: object, outcome: Outcome) -> None:
    """Raise QuantizationError where a restored model differs, unless it differs from itself."""
    try:
        outcome.check(model, example)
    except ResultsDiffer as error:
        if unrepeatable_module(model, example, Outcome.of(model, example)) is None:
            raise QuantizationError(
                f"restore_: {float_name(model)}: the float model {error}; expected what the "
                "quantized one computes with every quantizer off. Call restore_ without an example"
            ) from None
