"""Everything that comes before the first training step, in one call."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from torch import nn

from torchq.config import QuantConfig
from torchq.errors import ConfigError
from torchq.fusion.modules import is_norm
from torchq.graph import move_to
from torchq.nn.convert import unchanged_on_error
from torchq.swap import Plan, quantize_
from torchq.swap.apply import keep_plan
from torchq.swap.folds import narrow_weights_
from torchq.utils import Pattern, device_of, listed, network_of
from torchq.workflow import CalibrationReport, calibrate, quantizers, weight_quantizers
from torchq.workflow.added_operators import OperatorChoice, costly_operators

#: Enough for ranges that training starts from.
_BATCHES = 32
#: Batches that are kept to rank the operators of a target on.
_READ_AGAIN = 4


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    range_lr: float | None = None,
    input_range_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups for weights, for biases and norms, and for learned ranges.

    Weight decay would pull a learned range towards zero, where it clips everything, and a range
    needs a learning rate of its own.

    Args:
        model: a model, quantized or not.
        lr: the learning rate of all parameters but the ranges.
        weight_decay: of parameters with two or more dimensions; the others (biases, norms) and
            the ranges have none.
        range_lr: the learning rate of learned ranges; None takes ``lr``.
        input_range_lr: the learning rate of those ranges that are not of weights, which get a group
            of their own, ``input_ranges``. None takes ``range_lr``, in the group ``ranges``.

    Returns:
        Up to four groups named ``weights``, ``biases_and_norms``, ``ranges`` and ``input_ranges``
        for any ``torch.optim`` optimizer. Parameters without gradient are left out.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        >>> _ = torchq.quantize_(model, torchq.recipes.w4a4())
        >>> [(g["name"], len(g["params"])) for g in param_groups(model, lr=0.1)]
        [('weights', 3), ('biases_and_norms', 3), ('ranges', 2)]
    """
    model = network_of(model)
    of_weights = weight_quantizers(model)
    names = {
        id(end): "ranges"
        if input_range_lr is None or id(q) in of_weights
        else "input_ranges"
        for q in quantizers(model).values()
        for end in q.parameters(recurse=False)
    }
    groups: dict[str, dict[str, Any]] = {
        "weights": {"lr": lr, "weight_decay": weight_decay},
        "biases_and_norms": {"lr": lr, "weight_decay": 0.0},
        "ranges": {"lr": lr if range_lr is None else range_lr, "weight_decay": 0.0},
        "input_ranges": {"lr": input_range_lr, "weight_decay": 0.0},
    }
    members: dict[str, list[nn.Parameter]] = {name: [] for name in groups}
    for parameter in model.parameters():
        kind = "weights" if parameter.dim() > 1 else "biases_and_norms"
        if parameter.requires_grad:
            members[names.get(id(parameter), kind)].append(parameter)
    nonempty = {name: params for name, params in members.items() if params}
    return [
        {"name": name, "params": params, **groups[name]}
        for name, params in nonempty.items()
    ]


#: What a model that was trained for no runtime lacks.
NO_TARGET = (
    "no target: a file will lack the quantizers between layers that its runtime needs, so parts "
    "stay float there; pass target=, one of torchq.targets()"
)


@dataclass(frozen=True)
class Preparation:
    """What :func:`prepare` did; ``str()`` tells it.

    Attributes:
        model: the model that was given, quantized now.
        quantized: the report of the swap.
        calibrated: the report of the calibration.
        param_groups: for any ``torch.optim`` optimizer, see :func:`torchq.qat.param_groups`.
        batchnorms: paths of the BatchNorms that train along and are folded afterwards.
        operators: what quantizers beside layers cost at the outputs before training.
    """

    model: nn.Module = field(repr=False)
    quantized: Plan
    calibrated: CalibrationReport
    param_groups: list[dict[str, Any]] = field(repr=False)
    batchnorms: tuple[str, ...] = ()
    operators: OperatorChoice = field(default_factory=OperatorChoice)

    def __str__(self) -> str:
        """Return one line for each thing that was done, and one for what follows."""
        groups = ", ".join(
            f"{len(g['params'])} {g['name']} (lr {g['lr']:g}, decay {g['weight_decay']:g})"
            for g in self.param_groups
        )
        lines = [
            f"quantized: {self.quantized.verdict()}",
            f"calibrated: {self.calibrated.verdict()}",
            f"parameters: {groups}",
        ]
        if self.batchnorms:
            count = len(self.batchnorms)
            lines.append(
                f"BatchNorm: {count} layers train along; fuse_ folds them afterwards"
            )
        if self.operators.line:
            lines.append(self.operators.line)
        if self.quantized.target is None:
            lines.append(NO_TARGET)
        return "\n".join(lines)


def prepare(
    model: nn.Module,
    loader: Iterable[Any],
    recipe: QuantConfig | None = None,
    *,
    exclude: Sequence[Pattern] | Pattern | None = None,
    target: str | None = None,
    lr: float = 1e-2,
    range_lr: float | None = None,
    input_range_lr: float | None = None,
    weight_decay: float = 1e-4,
    **calibration: Any,
) -> Preparation:
    """Make ``model`` ready for quantization-aware training, in place.

    It swaps the layers, calibrates them, and sorts the parameters into groups for the optimizer.
    BatchNorms stay, which makes large learning rates safe; :func:`torchq.fuse_` folds them after
    training without changing a code. Integer weights in front of them have no lowest code, -128 of
    int8 say, as it has no counterpart under a negative factor. With a target everything is planned
    as for the folded model, so what trains is what runs: nothing is planned again afterwards. A
    call that fails leaves the model as it was.

    Args:
        model: a trained float model; its mode stays.
        loader: batches as for :func:`torchq.calibrate`; training batches with labels are fine.
        recipe: the rules; default INT8. Let few bits learn their ranges: ``recipes.w4a4()``, or
            ``recipes.integer(4, 8, learn_ranges=True)``.
        exclude: as for :func:`torchq.quantize_`.
        target: the runtime that the model is trained for, as for :func:`torchq.quantize_`; the
            first batch is the example. Without one the file lacks the quantizers between layers
            that its runtime needs, and the result says so.
        lr: of weights, biases and norms. A network that was fused before needs a hundredth of it,
            in float too.
        range_lr: of learned ranges; default ``lr``.
        input_range_lr: of those that are not of weights; default ``range_lr``.
        weight_decay: of weights; biases, norms and ranges have none.
        **calibration: for :func:`torchq.calibrate`, such as ``method``, ``forward``, ``group`` and
            ``progress``. ``num_batches`` is 32 unless given.

    Returns:
        What was done, with the parameter groups; ``print`` it.

    Raises:
        ConfigError: an argument is invalid, there is no batch, or see :func:`torchq.quantize_`.
        CalibrationError: see :func:`torchq.calibrate`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> loader = [(torch.randn(4, 3, 8, 8), torch.zeros(4))]
        >>> prepared = prepare(model, loader, target="onnxruntime", progress=False)
        >>> print(prepared)  # doctest: +ELLIPSIS
        quantized: ...
        calibrated: ...
        parameters: 1 weights (lr 0.01, decay 0.0001), 3 biases_and_norms (lr 0.01, decay 0)
        BatchNorm: 1 layers train along; fuse_ folds them afterwards
        >>> optimizer = torch.optim.SGD(prepared.param_groups, momentum=0.9)
    """
    model = network_of(model)
    first, batches = _with_first(loader)
    # A forward of the user's own knows how to read a batch, and nobody else does.
    example = None
    device = device_of(model)
    if calibration.get("forward") is None:
        example = first if device is None else move_to(first, device)
    progress = calibration.get("progress", True)
    with unchanged_on_error(model):
        planning_example = None if target is None else example
        quantized = quantize_(
            model,
            recipe,
            exclude=exclude,
            target=target,
            example=planning_example,
            progress=progress,
        )
        quantized = _with_narrow_weights(model, quantized, example)
        # Training takes back itself what a correction of results would.
        settings = {"num_batches": _BATCHES, "correct": False, **calibration}
        calibrated = calibrate(model, batches, **settings)
        # Training heals what operators cost too, so the plan stays.
        operators = OperatorChoice()
        if settings.get("group") is None:
            forward = settings.get("forward")
            operators = costly_operators(model, batches, forward, calibrated.batches)
    _warn_of_empty_ranges(model, calibrated)
    groups = param_groups(
        model,
        lr=lr,
        weight_decay=weight_decay,
        range_lr=range_lr,
        input_range_lr=input_range_lr,
    )
    norms = tuple(name for name, module in model.named_modules() if is_norm(module))
    return Preparation(model, quantized, calibrated, groups, norms, operators)


def _warn_of_empty_ranges(model: nn.Module, calibrated: CalibrationReport) -> None:
    """Warn of fixed ranges of zero: what comes there stays zero, whatever is trained.

    Networks whose last norms start with factors of zero have them before their first step. A
    learned range recovers.
    """
    by_name = quantizers(model)
    fixed = [n for n in calibrated.empty if not by_name[n].descriptor.learn_amax]
    if fixed:
        warnings.warn(
            f"prepare: nothing but zeros reached {listed(fixed)}, so nothing will pass there, "
            "however long it trains. Prepare a model that was trained in float (its last norms "
            "start at zero before), or learn ranges: "
            "torchq.recipes.integer(8, 8, learn_ranges=True)",
            stacklevel=3,
        )


def _with_narrow_weights(model: nn.Module, plan: Plan, example: object) -> Plan:
    """Let weights that a BatchNorm follows have codes of both signs alike; return the plan."""
    narrow = narrow_weights_(model, example)
    rows = (replace(d, weight=narrow.get(d.name, d.weight)) for d in plan.decisions)
    plan = replace(plan, decisions=tuple(rows))
    keep_plan(model, plan)
    return plan


class _Batches:
    """All batches of a loader; read once more, the first few of them, without a new start of it."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._first: list[object] = []

    def __iter__(self) -> Iterator[object]:
        """Yield the batches that are kept, then those that were not read yet."""
        yield from list(self._first)
        for batch in self._batches:
            if len(self._first) < _READ_AGAIN:
                self._first.append(batch)
            yield batch


def _with_first(loader: Iterable[object]) -> tuple[object, Iterable[object]]:
    """Return the first batch, and all batches including it, whatever kind of iterable."""
    batches = iter(loader)
    try:
        first = next(batches)
    except StopIteration:
        raise ConfigError(
            "prepare: got no batch; expected at least one. A generator runs only once: make a new "
            "one"
        ) from None
    return first, _Batches(chain((first,), batches))
