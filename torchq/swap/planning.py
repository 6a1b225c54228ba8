"""Planning and quantizing: rules, then what a target adds, then what runs in float show.

With an example, planning runs the model twice, and no more often:

1. As it is, in :func:`torchq.nn.calls.find.find_calls`: which calls have weights, where in the code
   operators stand, what is overwritten. This decides what is converted.
2. Converted for a while, every quantizer off, in :meth:`torchq.swap.facts.Facts.converted`: which
   quantizer reads which tensor, and what reads the results.

The second run cannot be read from the first. Which tensors a quantizer reads is the code of its
layer, which anyone can register, and forwards with calls of weights run rewritten. An operator that
worked in place gives a new tensor, and one activation that stands in several places is several. And
a forward that looks at the classes of its layers is refused because of what this run does.

Nor can the first be left out by converting what the source of forwards shows: of 72 networks of the
tests, a run changes what is converted in 21. Little would be won. With what both runs note noted in
one, ResNet-18, MobileNetV2 and GoogLeNet were planned in 97 to 107 % of the time, as noting takes
longer than their layers and each of two watchers sees what the other one calls; ViT-B/16 in 68 %.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from torchq.config import QuantConfig, Rule
from torchq.errors import ConfigError, TorchqError
from torchq.graph import prepared_call
from torchq.nn.calls.find import Seen, find_calls
from torchq.nn.convert import unchanged_on_error
from torchq.runtime import Codes, Runtime, remember_target, runtime_of, settings_of
from torchq.swap.apply import (
    as_it_is,
    carry_out_,
    carry_out_compared_,
    class_name,
    forward_digests,
    keep_plan,
)
from torchq.swap.decisions import (
    Draft,
    Rules,
    check_used,
    config_or_default,
    decide,
    patterns,
    resolve_positions,
)
from torchq.swap.facts import Facts
from torchq.swap.find_operators import (
    READ_AGAIN,
    OperatorSite,
    modules_with_other_readers,
)
from torchq.swap.held import Held, layers_kept
from torchq.swap.keeping import Keep, kept_plan
from torchq.swap.passes import passes_for
from torchq.swap.placement import decide_for_target
from torchq.swap.plan import Operators, Plan
from torchq.swap.same_results import (
    OFF,
    cannot_run,
)
from torchq.swap.share import Work, counting_products, warn_if_small, work_of
from torchq.utils import (
    Pattern,
    network_of,
    progress_stages,
    qualified_name,
    random_kept,
    state_kept,
    uncompiled,
    untouched,
)

_Operators: TypeAlias = tuple[tuple[OperatorSite, Draft], ...]


def quantize_(
    model: nn.Module,
    config: QuantConfig | None = None,
    *,
    include: Sequence[Pattern] | Pattern | None = None,
    exclude: Sequence[Pattern] | Pattern | None = None,
    target: str | Runtime | None = None,
    example: object = None,
    keep: str | Keep | None = None,
    check: bool = True,
    progress: bool = True,
) -> Plan:
    """Swap the layers of ``model`` for quantized ones, in place: all that were planned, or none.

    The module objects stay the same; only their classes change and quantizers are added, so
    optimizers, hooks, attributes and references from elsewhere stay valid. The exception is a
    module without parameters that stands in several places, such as one activation object for all
    layers: each place gets a copy, as each needs a range of its own. Without calibration every
    quantizer takes its range from the data of each call; run :func:`torchq.calibrate` next.

    Args:
        model: any module; changed in place.
        config: as for :func:`plan`.
        include: as for :func:`plan`.
        exclude: as for :func:`plan`.
        target: as for :func:`plan`.
        example: the arguments for one call of the model; see
            :func:`torchq.graph.call_arguments`. With it, quantizers that see the same tensor
            become one, so that its readers agree on its range whatever training does. First layers
            that the target runs faster in float stay float, unless a rule is the path of the layer.
        keep: as for :func:`plan`.
        check: with an example, run the converted model with every quantizer off, and the float
            model, and refuse the conversion where their results are not equal bit for bit. A model
            that differs from itself, as one does whose forward asks the time, cannot be compared;
            the report names the module. ``False`` saves two runs, and the report says so.
        progress: show the stages.

    Returns:
        What was swapped, what was not and why, and which rule decided; ``print`` it.

    Raises:
        ConfigError: See :func:`plan`. Whatever the error, the model is unchanged then.
        QuantizationError: The converted model computes something else. The text names the first
            module that does, what was changed in it, and how to leave it out.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> print(torchq.quantize_(model))
        module  type    what                                                   by
        0       Conv2d  input int8 per-tensor max, weight int8 axis=0 max      type:...
        no target: portable; one may add operators and choose codes: torchq.plan(model, target=...)
        1 quantized, 0 skipped, recipe int8; 100.0% of the weights of layers quantized
        >>> type(model[0]).__name__
        'QuantConv2d'
    """
    model = network_of(model)
    stages = progress_stages("quantize", ("plan", "swap"), enabled=progress)
    # What is made in inference mode could not be calibrated or trained outside of it.
    with torch.inference_mode(False), uncompiled(), stages as next_stage:
        planned = _kept(model, config, include, exclude, target, example, keep)
        next_stage()
        planned = _carried_out_(model, planned, runtime_of(target), example, check)
    if keep is None:
        warn_if_small(model, planned.share)
    return planned


def _carried_out_(
    model: nn.Module,
    planned: Plan,
    runtime: Runtime | None,
    example: object,
    check: bool,
) -> Plan:
    """Quantize a float model as was planned, in place, and keep the plan with it."""
    with unchanged_on_error(model):
        if example is not None and check:
            planned = carry_out_compared_(model, planned, example)
        else:
            planned = planned if example is None else replace(planned, check=OFF)
            carry_out_(model, planned)
        keep_plan(model, planned)
        if runtime is not None:
            remember_target(model, runtime)
    return planned


def quantize_around_(
    model: nn.Module,
    config: QuantConfig,
    held: Held,
    target: Runtime | None,
    example: object,
) -> Plan:
    """Quantize the layers of another maker, and beside them what a target needs, in place.

    Args:
        model: in float.
        config: the rules for these layers; of what is added, the form is that of the first input.
        held: which layers they are, and their ranges. No pass of the target changes them, and no
            other range is joined with one of theirs.
        target: the runtime; None adds nothing.
        example: as for :func:`plan`.

    Returns:
        The plan. Ranges are not set.
    """
    with torch.inference_mode(False), uncompiled():
        planned = _planned(model, config, None, None, target, example, held)
        return _carried_out_(model, planned, target, example, True)


def plan(
    model: nn.Module,
    config: QuantConfig | None = None,
    *,
    include: Sequence[Pattern] | Pattern | None = None,
    exclude: Sequence[Pattern] | Pattern | None = None,
    target: str | Runtime | None = None,
    example: object = None,
    keep: str | Keep | None = None,
) -> Plan:
    """Decide what :func:`quantize_` would do; nothing is changed.

    Args:
        model: any module; a bare layer too.
        config: the rules; default the recipe of the target, :func:`torchq.recipes.int8` without
            one.
        include: only modules that match one of these patterns.
        exclude: no module that matches one of these patterns.
        target: also place quantizers where this runtime wants them; one of
            :func:`torchq.targets`, or a :class:`torchq.runtimes.Runtime`. Additions,
            concatenations and the like in the forward of a module become children of it, named
            ``quant_add``, ``quant_cat_1``, ...
        example: the arguments for one call of the model; see
            :func:`torchq.graph.call_arguments`. The model runs twice on it, in float: this shows
            the operators of forwards that cannot be traced, the function calls with weights in
            every forward, and which tensors quantizers share. Without it these calls are found
            where a forward passes the weight of a child to a function.
        keep: a rule of what stays quantized. ``"pays"`` leaves in float what gains no time on
            the runtime of the target, all of it if the float model is not slower: files are made
            and timed on the example, which takes a minute or two. For a runtime elsewhere:
            :class:`torchq.runtimes.Pays`.

    Returns:
        Every decision with the rule that made it; ``print`` it for a dry run. Its last line says
        how much is quantized: of the multiply-adds of the example, or of the weights of layers
        without one. Below a third of what was not excluded, a warning names the reasons.

    Raises:
        InputError: ``config`` is no QuantConfig.
        ConfigError: A pattern of ``include`` or ``exclude``, or a rule that is not ``optional``,
            selects no module that could be quantized; or nothing at all would be quantized; or
            the model is a program of torch.export.
    """
    model = network_of(model)
    with torch.inference_mode(False), uncompiled():
        planned = _kept(model, config, include, exclude, target, example, keep)
    if keep is None:
        warn_if_small(model, planned.share)
    return planned


def _kept(
    model: nn.Module,
    config: QuantConfig | None,
    include: Sequence[Pattern] | Pattern | None,
    exclude: Sequence[Pattern] | Pattern | None,
    target: str | Runtime | None,
    example: object,
    keep: str | Keep | None,
) -> Plan:
    """Return the plan without what a rule leaves in float."""

    def without(paths: Iterable[str]) -> Plan:
        excluded = [*patterns(exclude), *paths]
        return _planned(model, config, include, excluded, target, example)

    if keep is None:
        return without(())
    return kept_plan(keep, model, without, example, runtime_of(target))


def _planned(
    model: nn.Module,
    config: QuantConfig | None,
    include: Sequence[Pattern] | Pattern | None,
    exclude: Sequence[Pattern] | Pattern | None,
    target: str | Runtime | None,
    example: object,
    held: Held | None = None,
) -> Plan:
    """Return what :func:`plan` does, without a warning where little is quantized."""
    runtime = runtime_of(target)
    config = config_or_default(config, runtime)
    _refuse_programs(model)
    if example is not None:
        _refuse_lazy(model)
    config = config.with_rules(
        *(Rule(pattern, skip=True) for pattern in patterns(exclude))
    )
    rules = Rules(config, patterns(include))
    with random_kept(), state_kept(model):
        rules, drafts, operators, work = _decided(model, rules, runtime, example)
    planned = replace(
        as_it_is(model),
        decisions=tuple(draft.decision() for draft in drafts),
        operators=_sites_of(operators),
        shared=(),
        modes={},
        target=None if runtime is None else runtime.name,
        settings=settings_of(runtime),
        recipe=rules.config.name,
        work=work,
    )
    decided = {} if held is None else held.decided(planned)
    facts = Facts.before_conversion(model, runtime, _mains_of(operators))
    named = frozenset(p for p in rules.include if isinstance(p, str))
    facts = replace(facts, included=named)
    if held is not None:
        codes = _as_rules_say(facts.codes)
        facts = replace(facts, codes=codes, held=held.ranges)
    for adapt in () if runtime is None else runtime.adapting:
        planned = adapt(planned, facts)
    planned = layers_kept(planned, decided)
    check_used(model, rules, drafts, planned)
    with random_kept():
        facts = facts.converted(model, planned, example)
    for planning_pass in passes_for(runtime):
        planned = layers_kept(planning_pass(planned, facts), decided)
    return replace(planned, forwards=forward_digests(model, planned))


def _as_rules_say(codes: Codes | None) -> Codes | None:
    """Return the codes of a target that leaves the form of activations as rules have it."""
    return None if codes is None else replace(codes, unsigned=False, fitted=False)


def _decided(
    model: nn.Module, rules: Rules, runtime: Runtime | None, example: object
) -> tuple[Rules, tuple[Draft, ...], _Operators, Work]:
    """Return the rules, with those of a target, what they decide, and the work of the model."""
    recorded = products = None
    if example is not None:
        with counting_products(model) as (products, operations):
            recorded = _seen(model, example, operations)
    rules = replace(rules, config=resolve_positions(model, rules.config, recorded))
    operators: _Operators = ()
    if runtime is None or runtime.placement is None:
        drafts = decide(model, rules, recorded)
    else:
        rules, drafts, operators = decide_for_target(
            model, rules, runtime, runtime.placement, recorded
        )
    reasons = dict.fromkeys(modules_with_other_readers(model, recorded), READ_AGAIN)
    if recorded is not None:
        reasons |= dict.fromkeys(recorded.written_weights, _WRITTEN)
        reasons |= dict.fromkeys(recorded.without_memory, _NO_MEMORY)
        drafts = tuple(draft.after_run() for draft in drafts)
    return (
        rules,
        tuple(_in_float(draft, reasons) for draft in drafts),
        operators,
        work_of(model, products, _work_of_calls(model, recorded), example),
    )


def _work_of_calls(
    model: nn.Module, recorded: Seen | None
) -> dict[str, dict[str, float]]:
    """Return path of a module -> place of a call with a weight -> its multiply-adds."""
    found = {} if recorded is None else recorded.calls
    operations = {
        name: found[id(module)].operations
        for name, module in model.named_modules()
        if id(module) in found
    }
    return {
        name: {place: count / 2 for place, count in counts.items()}
        for name, counts in operations.items()
        if counts
    }


def _seen(model: nn.Module, example: object, operations: Callable[[], int]) -> Seen:
    """Return what a run shows; an error that comes of watching it is one by name."""
    try:
        return find_calls(model, example, operations)
    except TorchqError:
        raise
    except Exception as error:  # whatever the code of the model raises
        with random_kept(), untouched(model):
            prepared_call(model, example)()  # An error of its own is raised as it is.
        raise cannot_run(model, error) from error


def _in_float(draft: Draft, reasons: Mapping[int, str]) -> Draft:
    """Return the decision to leave a module float where there is a reason, by its id."""
    reason = reasons.get(id(draft.module), "")
    if not reason or draft.reason or (reason == _WRITTEN and draft.weight is None):
        return draft
    return replace(draft, reason=reason, input=None, weight=None)


#: Why quantizers cannot read the input of a layer.
_NO_MEMORY = "it is given sparse tensors, or runs inside torch.vmap"
#: Why a layer cannot keep codes of its weight.
_WRITTEN = "its weight is written while the model runs"


def _sites_of(operators: _Operators) -> dict[str, Operators]:
    sites_by_owner: dict[str, Operators] = {}
    for operator, _ in operators:
        entry = Operators(class_name(operator.owner), {})
        sites: Any = sites_by_owner.setdefault(operator.owner_names[0], entry).sites
        sites[operator.site] = operator.child
    return sites_by_owner


def _mains_of(operators: _Operators) -> dict[str, int]:
    """Return path of an addition -> its operand that comes straight from a layer."""
    mains = [(operator.names[0], operator.main) for operator, _ in operators]
    return {path: main for path, main in mains if main is not None}


def _refuse_lazy(model: nn.Module) -> None:
    """Raise ConfigError for a lazy module, whose parameters the run on an example would make."""
    for path, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"{path}: is not initialised yet; expected a model with all its parameters. Run "
                "one batch through the model first"
            )


def _refuse_programs(model: nn.Module) -> None:
    """Raise ConfigError for a program of torch.export or torch.jit, which has no layers left."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"{qualified_name(type(model))}: got a program of torch.jit, whose layers are no "
            "Python modules; expected the model that it was made from. Quantize it before "
            "torch.jit.script or trace"
        )
    # Such a module refuses to change its mode by methods of its own.
    if isinstance(model, fx.GraphModule) and "eval" in vars(model):
        raise ConfigError(
            f"{qualified_name(type(model))}: got a program of torch.export, whose layers are calls "
            "of operators; expected the model that was exported. Quantize it, then export it"
        )
