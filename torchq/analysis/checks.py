"""What is looked for in a quantized model: one function for each kind of mistake."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.analysis.detections import detections_in
from torchq.analysis.layers import (
    channel_axes,
    example_for,
    largest_of_channels,
    layers_with_weights,
    line_equalized,
    line_even_inputs,
    line_of_formats,
    line_with,
    lines_without,
    named_target,
    passing,
)
from torchq.analysis.outputs import GOOD_RATIO, Outputs
from torchq.errors import ConfigError
from torchq.fusion.modules import is_layer, is_norm
from torchq.graph import Call, Flow, is_torch_leaf, record
from torchq.nn import QuantModule, TensorQuantizer, quantized_as
from torchq.nn.calls.find import find_calls
from torchq.swap import plan_of
from torchq.swap.heads import BY as HEAD
from torchq.utils import Registry, child_path, untouched, watching
from torchq.workflow.changed_weights import has_range_of_its_weight, reach
from torchq.workflow.layer_matrices import channel_ranges, spread
from torchq.workflow.modes import quantized_weights

Severity = Literal["error", "warning", "info"]
#: From the gravest to the mildest.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

_CALIBRATE = "torchq.calibrate(model, batches, force=True)"
#: Ratio of a weight's magnitude to its range from which on the weight has changed since.
_CHANGED = 1.05
#: Ratio from which on the range is that of another weight.
_STALE = 2.0
#: How far values may exceed the range that "max" found on others: as an error, and where outputs
#: are damaged.
_APART, _BEYOND = 4.0, 1.5
#: How far a range may be from what samples reach on average, to be taken for that average.
_USUAL = 1.25
#: How far other methods than "max" may cut a range on purpose.
_CUT = 8.0
#: Largest over median channel magnitude from which on one scale costs the median channel 4 bits.
_SPREAD = 16.0
#: Largest over median channel of an activation from which on the median has 2 of 127 codes.
_RULING = 64.0
#: Channels from which on one of them can be an exception.
_FEWEST_CHANNELS = 4
#: Scores of detections, as most detectors count them.
_DETECTED = 0.25
BYTE = 8
#: Values of one call that are kept.
_KEPT = 8192


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes:
        kind: the check that found it, a key of :data:`torchq.analysis.CHECKS`.
        severity: ``"error"``: the result is wrong or cannot be exported. ``"warning"``: accuracy
            or speed is lost. ``"info"``: good to know.
        name: dotted path of the module or quantizer.
        evidence: what was seen, with figures.
        remedy: the call that mends it.
    """

    kind: str
    severity: Severity
    name: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity} {self.kind}: {self.name or '(root)'}: {self.evidence}"


@dataclass(frozen=True)
class Cure:
    """One thing to do: a sentence with the reason, and the call."""

    text: str
    code: str


@dataclass
class Sample:
    """Some values of tensors, and the ends of all, at most and at least 0.

    ``means`` are the ends that one index of the first dimension has on average, as calibration
    averages ranges, and ``count`` is how many indices there were.
    """

    values: list[Tensor] = field(default_factory=list)
    low: float = 0.0
    high: float = 0.0
    means: tuple[float, float] = (0.0, 0.0)
    count: int = 0

    def add(self, x: Tensor) -> None:
        """Add a tensor that is not empty."""
        rows = x.detach().flatten(1) if x.dim() > 1 else x.detach().reshape(1, -1)
        low, high = torch.aminmax(rows, dim=1)
        self.low = min(self.low, float(low.min()))
        self.high = max(self.high, float(high.max()))
        self._average(low.clamp(max=0), high.clamp(min=0))
        flat = rows.reshape(-1)
        # Evenly spread elements; a clone, as a view would keep the whole tensor alive.
        step = max(1, flat.numel() // _KEPT)
        self.values.append(flat[::step].float().cpu().clone())

    def _average(self, low: Tensor, high: Tensor) -> None:
        """Add the ends of the samples of one tensor to the means."""
        before = self.count
        self.count += len(low)
        sums = (float(low.double().sum()), float(high.double().sum()))
        low_mean, high_mean = (
            (mean * before + total) / self.count
            for mean, total in zip(self.means, sums, strict=True)
        )
        self.means = low_mean, high_mean

    @property
    def usual(self) -> float:
        """The largest magnitude that a sample reaches on average."""
        return max(-self.means[0], self.means[1])


@dataclass
class Observation:
    """What was seen of quantizers, by their ids, and of modules, by their paths."""

    example: Any  # the first batch
    batches: int = 0
    reached: set[int] = field(default_factory=set)
    # Given NaN or infinity by the float model.
    not_finite: set[int] = field(default_factory=set)
    # What the float model gives.
    samples: dict[int, Sample] = field(default_factory=dict)
    # The largest magnitude of each channel that the float model gives, (channels,).
    channels: dict[int, Tensor] = field(default_factory=dict)
    # Adding a quantized tensor to one that is neither quantized nor the result of a layer.
    one_sided: list[str] = field(default_factory=list)
    # BatchNorm -> the layer before it.
    norms: dict[str, str] = field(default_factory=dict)
    # What the float model detects; None for outputs of another layout.
    detections: int | None = None

    def note(
        self,
        quantizer: TensorQuantizer,
        layer: nn.Module | None,
        args: Any,
        kwargs: object,
        _: None,
    ) -> None:
        """Note a call of a quantizer by the float model; ``layer`` reads it with a weight."""
        self.reached.add(id(quantizer))
        x = args[0].detach()
        scale = quantizer.pre_quant_scale
        if not bool(torch.isfinite(x).all()):
            self.not_finite.add(id(quantizer))
        elif x.numel():
            x = x if scale is None else x * scale.to(x.dtype)
            self.samples.setdefault(id(quantizer), Sample()).add(x)
            if layer is not None:
                self._note_channels(quantizer, largest_of_channels(layer, x))

    def _note_channels(self, quantizer: TensorQuantizer, largest: Tensor) -> None:
        before = self.channels.get(id(quantizer))
        if before is not None and before.shape == largest.shape:
            largest = torch.maximum(before, largest)
        self.channels[id(quantizer)] = largest

    def count_detections(self, output: object) -> None:
        """Add what the float model detects in a batch."""
        try:
            images = detections_in(output)
        except ConfigError:  # another layout
            return
        counts = [len(image.above(_DETECTED).scores) for image in images]
        self.detections = sum(counts) + (self.detections or 0)


def observe(
    model: nn.Module,
    known: dict[str, TensorQuantizer],
    batches: Iterable[object],
    run: Callable[[Any], object],
) -> Observation | None:
    """Run ``model`` in float on batches and return what was seen; None without any batch.

    Who feeds whom is read from one more run of the first batch, with the quantizers as they are.
    """
    observation: Observation | None = None
    layers = layers_with_weights(model)
    with untouched(model):
        for batch in batches:
            if observation is None:
                observation = Observation(batch)
                _follow(model, observation, run)
            notes = [
                (q, partial(observation.note, q, layers.get(id(q))))
                for q in known.values()
            ]
            with passing(model), watching(notes, before=True):
                output = run(batch)
            observation.batches += 1
            observation.count_detections(output)
    return observation


_ADDITIONS = frozenset(["add", "add_", "__add__", "__iadd__", "__radd__"])
_NORM = nn.modules.batchnorm._BatchNorm


def _follow(model: nn.Module, found: Observation, run: Callable[[Any], object]) -> None:
    """Run the first batch and note additions and BatchNorms."""
    flow = record(model, found.example, _is_leaf, forward=lambda _, batch: run(batch))
    for call in flow.calls:
        makers = [_maker(flow, flow.calls[index]) for index in call.inputs]
        if isinstance(call.module, _NORM) and makers and makers[0].module is not None:
            found.norms[call.name] = makers[0].name
        shapes = {maker.shape for maker in makers} | {call.shape}
        if call.name not in _ADDITIONS or len(shapes) != 1 or len(call.shape or ()) < 2:
            continue
        quantized = [isinstance(m.module, TensorQuantizer) for m in makers]
        # An operand that no call made is one of the model's own.
        others = [m.module for m in makers if not isinstance(m.module, TensorQuantizer)]
        # The addition, into itself.
        fuses = any(is_layer(m) or is_norm(m) for m in others)
        if sum(quantized) == 1 and not (call.arguments or fuses):
            found.one_sided.append(call.inside)


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, QuantModule):
        return not module.is_container and bool(
            module.slots() or module.quantizes_output
        )
    return isinstance(module, TensorQuantizer) or is_torch_leaf(module)


def _maker(flow: Flow, call: Call) -> Call:
    """Return what made the result of a call, behind modules that return their input."""
    module = call.module
    passes = isinstance(module, nn.Identity) or (
        isinstance(module, TensorQuantizer) and not module.quantizing
    )
    return _maker(flow, flow.calls[call.inputs[0]]) if passes and call.inputs else call


#: By how many dB the outputs must come nearer to float for a cure to be worth it.
LEAST_GAIN = 1.0
#: By how many dB even channels may stay behind 16 bits and float: they keep codes and speed.
_NEARLY = 3.0


@dataclass(frozen=True)
class Evened:
    """The outputs beside those in float, in dB, before and after channels are made even.

    Attributes:
        function: what makes them even, of ``torchq.ptq``.
        now: with the model as it is.
        anew: with one that is calibrated anew on the batches at hand.
        evened: the same, with even channels.
    """

    function: str
    now: float
    anew: float
    evened: float

    @property
    def gain(self) -> float:
        """How many dB even channels gain, beyond what a new calibration does."""
        return self.evened - max(self.now, self.anew)

    @property
    def helps(self) -> bool:
        """True where they gain enough."""
        return self.gain >= LEAST_GAIN

    def line(self, target: str | None) -> str:
        """Return the line that quantizes a quantized ``model`` anew, with even channels."""
        if self.function == "equalize_":
            return line_equalized(target)
        return line_even_inputs(target)


@dataclass(frozen=True)
class Healing:
    """The outputs beside those in float, in dB, with an input as it is, in 16 bits, in float.

    ``even`` tells what even channels do, where factors reach that input.
    """

    now: float
    wide: float
    as_float: float
    even: Evened | None = None

    @property
    def gain(self) -> float:
        """How many dB the best cure gains."""
        gain = max(self.wide, self.as_float) - self.now
        return gain if self.even is None else max(gain, self.even.gain)

    @property
    def wants_even_channels(self) -> bool:
        """True where even channels are enough: nearly as good as the others, or good outputs."""
        if self.even is None or not self.even.helps:
            return False
        enough = min(max(self.wide, self.as_float) - _NEARLY, GOOD_RATIO)
        return self.even.evened >= enough

    def remedy(self, layer: str, target: str | None) -> str:
        """Return the call that gives the layer of this path what heals it, for a target."""
        if self.even is not None and self.wants_even_channels:
            return self.even.line(target)
        if max(self.wide, self.as_float) - self.now < LEAST_GAIN:
            return f"nothing: {self._tried} bring the outputs no nearer to float"
        if self.wide >= self.as_float - LEAST_GAIN:
            slots = "input=torchq.QuantDescriptor(16), weight=torchq.QuantDescriptor(axis=0)"
            rule = f"torchq.Rule({layer!r}, {slots})"
            wide = line_with(f"config.with_rules({rule})", target)
            return (
                f"{wide}  # where the target has such codes, else exclude=[{layer!r}]"
            )
        return line_with(f"config, exclude=[{layer!r}]", target)

    def __str__(self) -> str:
        return (
            f"the outputs are {self.now:.1f} dB from float, {self.wide:.1f} with this input in 16 "
            f"bits, {self.as_float:.1f} with it in float{self._evened}"
        )

    @property
    def _tried(self) -> str:
        if self.even is None:
            return "16 bits and float"
        return f"{self.even.function}, 16 bits and float"

    @property
    def _evened(self) -> str:
        if self.even is None:
            return ""
        anew = self.even.anew
        also = f" ({anew:.1f} calibrated anew without)" if anew > self.now else ""
        return f", {self.even.evened:.1f} with channels evened by {self.even.function}{also}"


@dataclass(frozen=True)
class Patient:
    """A model under examination; ``weights`` are ids of quantizers of weights.

    ``seen`` is what a run on batches showed, or None without batches. ``outputs`` and ``cures``
    are those of a model without errors; ``healed`` tells of inputs that one channel rules, by
    path, what wider codes, float and even channels do to the outputs; ``even_inputs`` tells what
    even channels of what depthwise layers read do, and ``gain_in_float`` by how many dB the outputs
    come nearer with the worst layers in float.
    """

    model: nn.Module
    quantizers: dict[str, TensorQuantizer]
    weights: set[int]
    seen: Observation | None
    outputs: Outputs | None = None
    cures: tuple[Cure, ...] = ()
    healed: Mapping[str, Healing] = field(default_factory=dict)
    even_inputs: Evened | None = None
    gain_in_float: float = math.nan

    @property
    def target(self) -> str | None:
        """The runtime that the model is planned for."""
        return plan_of(self.model).target

    @property
    def active(self) -> dict[str, TensorQuantizer]:
        """The quantizers that are on."""
        return {path: q for path, q in self.quantizers.items() if q.quantizing}


#: Severity, name, evidence and remedy of findings.
Found = Iterator[tuple[Severity, str, str, str]]
Find = Callable[[Patient], Found]


@dataclass(frozen=True)
class Check:
    """Looks for one kind of fault; with ``needs_batches`` it can find nothing without a run."""

    find: Find
    needs_batches: bool


#: Kind -> check. One more is a function under ``@check``.
CHECKS: Registry[str, Check] = Registry("check")


def check(kind: str, *, needs_batches: bool = False) -> Callable[[Find], Find]:
    """Return a decorator that enters a function as the check for findings of ``kind``."""

    def enter(function: Find) -> Find:
        CHECKS.add(kind, Check(function, needs_batches))
        return function

    return enter


def _fixed(patient: Patient) -> Iterator[tuple[str, TensorQuantizer, Tensor]]:
    """Yield quantizers that are on and have a range, with it."""
    for path, quantizer in patient.active.items():
        if (
            quantizer.calibrated
            and not quantizer.descriptor.dynamic
            and not quantizer.amax.is_meta
        ):
            yield path, quantizer, quantizer.amax.detach()


@check("unseen", needs_batches=True)
def unseen(patient: Patient) -> Found:
    """Yield quantizers of inputs that no batch reached."""
    assert patient.seen is not None
    for path, quantizer in patient.active.items():
        if id(quantizer) in patient.weights or id(quantizer) in patient.seen.reached:
            continue
        owner = path.rpartition(".")[0]
        has_static_range = quantizer.calibrated and not quantizer.descriptor.dynamic
        severity: Severity = (
            "warning" if has_static_range or quantizer.descriptor.dynamic else "error"
        )
        remedy = f"{lines_without([owner])}  # or batches that reach it"
        yield (
            severity,
            path,
            f"none of {patient.seen.batches} batches reached it",
            remedy,
        )


@check("no_detection", needs_batches=True)
def no_detection(patient: Patient) -> Found:
    """Yield a detector that detects nothing in the batches, whose ranges are those of nothing."""
    assert patient.seen is not None
    has_head = any(d.by == HEAD for d in plan_of(patient.model).decisions)
    if has_head and patient.seen.detections == 0:
        evidence = (
            f"the float model detects nothing in {patient.seen.batches} batches, with scores of "
            f"{_DETECTED} and more: ranges of scores and boxes are those of background"
        )
        remedy = "torchq.calibrate(model, batches, force=True)  # with pictures of its objects"
        yield "warning", "", evidence, remedy


@check("uncalibrated")
def uncalibrated(patient: Patient) -> Found:
    """Yield quantizers without a range, which take that of each call for the time."""
    for path, quantizer in patient.active.items():
        if not quantizer.calibrated and not quantizer.descriptor.dynamic:
            evidence = "has no range yet, and takes that of each call"
            yield "error", path, evidence, "torchq.calibrate(model, batches)"


@check("dynamic_range")
def dynamic_range(patient: Patient) -> Found:
    """Yield quantizers that take the range of each call, as their descriptor says."""
    for path, quantizer in patient.active.items():
        if quantizer.descriptor.dynamic:
            evidence = "takes the range of each call, as its descriptor says; no file can hold that"
            remedy = "a recipe without dynamic ranges, to export"
            yield "info", path, evidence, remedy


@check("zero_range")
def zero_range(patient: Patient) -> Found:
    """Yield ranges of 0, which turn everything into 0, and learned ones that became negative."""
    for path, quantizer, amax in _fixed(patient):
        count = int((quantizer.dead_ranges() | (amax < 0)).sum())
        if not count:
            continue
        share = f"{count} of {amax.numel()}"
        if quantizer.descriptor.learn_amax:
            smallest = float(amax.min())
            evidence = (
                f"{share} learned ranges are 0 or negative (smallest {smallest:.3g})"
            )
            remedy = (
                f"{_CALIBRATE}  # then train with a smaller learning rate: "
                "torchq.qat.param_groups(model, lr=...)"
            )
            yield "error", path, evidence, remedy
        elif id(quantizer) in patient.weights:
            remedy = "nothing, if the channels are meant to be 0"
            yield "info", path, f"{share} channels of the weight are 0", remedy
        else:
            yield _range_of_zero(patient, path, count)


def _range_of_zero(
    patient: Patient, path: str, count: int
) -> tuple[Severity, str, str, str]:
    """Return the finding of ranges of 0 for what is no weight; ``count`` tells how many."""
    quantizer = patient.quantizers[path]
    total = quantizer.amax.numel()
    share = f"{count} of {total}"
    again = f"{_CALIBRATE}  # data that is not 0"
    if patient.seen is not None and _is_zero_there(patient.seen, quantizer):
        what = "all that it reads is 0" if count == total else "these channels are 0"
        evidence = f"{share} ranges are 0: {what} in these batches"
        return (
            "info",
            path,
            evidence,
            f"nothing, if that is so in all data; else {again}",
        )
    becomes = "everything becomes 0" if count == total else "these channels become 0"
    # Channels that a ReLU never lets through are usual.
    is_unsure = patient.seen is None and count < total
    severity: Severity = "warning" if is_unsure else "error"
    return severity, path, f"{share} ranges are 0, so {becomes}", again


def _is_zero_there(seen: Observation, quantizer: TensorQuantizer) -> bool:
    """Return True if the float model gives 0 alone to the ranges of a quantizer that are 0."""
    sample = seen.samples.get(id(quantizer))
    if sample is None:
        return False
    dead = quantizer.dead_ranges().flatten()
    largest = seen.channels.get(id(quantizer))
    if largest is None or largest.numel() != dead.numel():
        return max(-sample.low, sample.high) == 0
    return not bool(largest.to(dead.device)[dead].any())


@check("nan_range")
def nan_range(patient: Patient) -> Found:
    """Yield ranges that are no finite numbers, and the place where NaN first arises."""
    for path, _, amax in _fixed(patient):
        bad = int((~torch.isfinite(amax)).sum())
        if bad:
            evidence = f"{bad} of {amax.numel()} ranges are NaN or infinite"
            yield "error", path, evidence, _CALIBRATE
    if patient.seen is None:
        return
    for path, quantizer in patient.active.items():
        if id(quantizer) in patient.seen.not_finite:
            evidence = (
                "was given NaN or infinity by the float model; the layers behind follow"
            )
            yield "error", path, evidence, "check the data and the float model"
            return


def reaches(patient: Patient) -> Iterator[tuple[str, float, float, bool]]:
    """Yield quantizers of inputs, where their ranges end, and the values that they are given.

    The last item is True where a range may be shorter on purpose.
    """
    sample_by_id = {} if patient.seen is None else patient.seen.samples
    for path, quantizer, _ in _fixed(patient):
        sample = sample_by_id.get(id(quantizer), Sample())
        range_end = max(
            float(end.detach().abs().max()) for _, end in quantizer.range.ends()
        )
        largest = max(-sample.low, sample.high)
        d = quantizer.descriptor
        if (
            id(quantizer) not in patient.weights
            and largest > 0
            and 0 < range_end < float("inf")
        ):
            # Other methods than "max" cut the range, tenfold with 4 bits, and so does training.
            cuts = d.learn_amax or d.calib_method not in ("max", "moving_average")
            # And so does calibration, where averages over samples bring outputs nearer to float.
            is_usual = sample.usual / _USUAL < range_end < sample.usual * _USUAL
            cuts = cuts or (sample.count > 1 and is_usual)
            yield path, range_end, largest, cuts


def exceeded(patient: Patient) -> list[str]:
    """Return the quantizers of inputs whose range is too short or far too long for their values."""
    return [
        path
        for path, range_end, largest, cuts in reaches(patient)
        if (largest > range_end * _BEYOND and not cuts) or range_end > largest * _CUT
    ]


@check("range_off", needs_batches=True)
def range_off(patient: Patient) -> Found:
    """Yield ranges of inputs that the values of the batches exceed by far, or hardly use."""
    for path, range_end, largest, cuts in reaches(patient):
        if largest > range_end * _APART and not cuts:
            evidence = (
                f"its range ends at {range_end:.3g}, and values reach {largest:.3g}"
            )
            yield "error", path, evidence, _CALIBRATE
        elif range_end > largest * _CUT:
            evidence = (
                f"its range ends at {range_end:.3g}, and no value exceeds {largest:.3g}"
            )
            yield (
                "warning",
                path,
                evidence,
                f"{_CALIBRATE}, if these batches are data of the task",
            )


@check("wrong_order")
def wrong_order(patient: Patient) -> Found:
    """Yield calibrations that did not finish, and weights that changed after theirs."""
    for path, quantizer in patient.quantizers.items():
        if quantizer.observing:
            evidence = (
                f"is in mode {quantizer.mode!r}: a calibration began and did not finish"
            )
            yield "error", path, evidence, "torchq.calibrate(model, batches)"
    paths = {id(q): path for path, q in patient.quantizers.items()}
    for quantizer, weight in quantized_weights(patient.model):
        if id(quantizer) in paths:
            yield from _stale(paths[id(quantizer)], quantizer, weight)


def _stale(path: str, quantizer: TensorQuantizer, weight: Tensor) -> Found:
    if not has_range_of_its_weight(quantizer, weight):
        return
    ratios = reach(quantizer, weight)
    if not ratios.numel():
        return
    wide = float(1 / ratios.min())
    narrow = float(ratios.max())
    # Other methods than "max" cut the range on purpose, but none makes it wider than the weight.
    is_whole = quantizer.descriptor.calib_method == "max"
    worst = max(wide, narrow if is_whole else narrow / _CUT)
    if worst > _CHANGED:
        evidence = (
            f"its range is off by a factor of {max(wide, narrow):.3g}: the weight changed after "
            "it was calibrated (fused, loaded or trained)"
        )
        remedy = f"{_CALIBRATE}  # after fusing and loading"
        severe = worst > _STALE
        yield "error" if severe else "warning", path, evidence, remedy


def _is_computing(module: nn.Module) -> bool:
    """Return True for a float layer that multiplies with a weight, and that could be quantized."""
    base = quantized_as(type(module))
    weight = getattr(module, "weight", None)
    if base is None or isinstance(module, (QuantModule, nn.Embedding, nn.EmbeddingBag)):
        return False
    return isinstance(weight, torch.Tensor) and weight.dim() > 1


@check("skipped_layer")
def skipped_layer(patient: Patient) -> Found:
    """Yield layers that stay float beside quantized ones."""
    # Attention quantizes the weight of the layer that it reads without calling it.
    read = {
        id(child)
        for module in patient.model.modules()
        if isinstance(module, QuantModule)
        for child in module.children()
    }
    for path, module in patient.model.named_modules():
        if _is_computing(module) and id(module) not in read:
            count = sum(p.numel() for p in module.parameters(recurse=False))
            evidence = f"{type(module).__name__} with {count:,} parameters stays float"
            remedy = "print(torchq.swap.plan_of(model))  # says why; it may be meant so"
            yield "info", path, evidence, remedy


@check("functional_call", needs_batches=True)
def functional_call(patient: Patient) -> Found:
    """Yield forwards that call a convolution or linear function with a weight of their own."""
    assert patient.seen is not None
    names = {id(module): path for path, module in patient.model.named_modules()}
    parameters = {id(p): path for path, p in patient.model.named_parameters()}
    for key, calls in find_calls(patient.model, patient.seen.example).calls.items():
        module = patient.model.get_submodule(names[key])
        if isinstance(module, (QuantModule, TensorQuantizer)) or quantized_as(
            type(module)
        ):
            continue
        # Attention has products of data alone; other calls have a weight, or compute one.
        sites = [site for site in calls.sites if site.kind != "attention"]
        products = sorted(calls.unreached.keys() - {"embedding", "attention"})
        kinds = list(dict.fromkeys([site.kind for site in sites] + products))
        if not kinds:
            continue
        evidence = (
            f"its forward calls {', '.join(kinds)} with a weight that stays float"
        )
        weights = [child_path(names[key], site.weight) for site in sites if site.weight]
        weights += sorted(parameters[source] for source in calls.sources)
        if weights:
            evidence += f" ({', '.join(dict.fromkeys(weights))})"
        remedy = line_with(f"config, {example_for(patient.target)}")
        if products or calls.obstacle:
            remedy = "let a layer of its own make the call, such as torch.nn.Linear"
        yield "warning", names[key], evidence, remedy


@check("attention_outside", needs_batches=True)
def attention_outside(patient: Patient) -> Found:
    """Yield modules of transformers whose attention is computed where no quantizer can be."""
    assert patient.seen is not None
    if not hasattr(patient.model, "set_attn_implementation"):
        return
    names = {id(module): path for path, module in patient.model.named_modules()}
    for key, calls in find_calls(patient.model, patient.seen.example).calls.items():
        if "attention" not in calls.unreached:
            continue
        evidence = "hands its attention to a function outside of it, which stays float"
        routed = "torchq.hugging_face.attend_in_modules_(model, batches[0])"
        again = f"torchq.quantize_(model, {named_target(patient.target)})"
        calibrated = "torchq.calibrate(model, batches)"
        remedy = f"torchq.restore_(model); {routed}; {again}; {calibrated}"
        yield "info", names[key], evidence, remedy


@check("one_sided_add", needs_batches=True)
def one_sided_add(patient: Patient) -> Found:
    """Yield additions with a quantizer on one operand, where the other is no layer's result.

    A runtime adds in integers where both operands have a scale, or where it can fuse the addition
    into the layer that makes the other operand.
    """
    assert patient.seen is not None
    for path in dict.fromkeys(patient.seen.one_sided):
        evidence = (
            "adds a quantized operand to one that is not, so the addition runs in float"
        )
        again = line_with(f"config, {named_target(patient.target)}")
        remedy = f"{again}  # or quantize both"
        yield "warning", path, evidence, remedy


@check("weight_axis")
def weight_axis(patient: Patient) -> Found:
    """Yield weight quantizers whose ranges do not follow the output channels."""
    paths = {id(quantizer): path for path, quantizer in patient.active.items()}
    quantizer_by_id = {
        id(quantizer): quantizer for quantizer in patient.active.values()
    }
    for module in patient.model.modules():
        for key, axes in channel_axes(module).items():
            axis = (
                quantizer_by_id[key].descriptor.axis if key in quantizer_by_id else None
            )
            if axis is None or axis == axes:
                continue
            name = (
                module.float_class.__name__
                if isinstance(module, QuantModule)
                else "its layer"
            )
            evidence = (
                f"has ranges along axis {axis}; the output channels of {name} are "
                f"axis {axes}"
            )
            remedy = f"QuantDescriptor(axis={axes}) for its weight, as recipes have"
            yield "error", paths[key], evidence, remedy


@check("range_spread")
def range_spread(patient: Patient) -> Found:
    """Yield weights with one scale whose channels differ widely, as after merging branches."""
    for path, module in patient.model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        weight = getattr(module, "weight", None)
        if not isinstance(quantizer, TensorQuantizer) or not quantizer.quantizing:
            continue
        if (
            quantizer.descriptor.axis is not None
            or quantizer.descriptor.block_size is not None
        ):
            continue
        if not isinstance(weight, torch.Tensor) or weight.is_meta or weight.dim() < 2:
            continue
        unequal = (
            spread(channel_ranges(module).detach().double()) if weight.numel() else 1.0
        )
        if unequal > _SPREAD:
            times = f"{unequal:.0f} times the median one"
            evidence = f"its largest channel is {times}, with one scale for all"
            axes = channel_axes(module).get(id(quantizer), (0,))
            remedy = f"{line_equalized(patient.target)}  # or weight=QuantDescriptor(axis={axes})"
            yield "warning", child_path(path, "weight_quantizer"), evidence, remedy


@dataclass(frozen=True)
class Ruling:
    """An input with one range, whose largest channel leaves the others few codes.

    Attributes:
        path: of its quantizer.
        channel: the largest one.
        times: its magnitude over the median of the channels that are not 0.
    """

    path: str
    channel: int
    times: float


def ruling_channels(patient: Patient) -> list[Ruling]:
    """Return the inputs of layers that one channel rules, the worst first."""
    seen = patient.seen
    rulings = []
    for path, quantizer, _ in _fixed(patient):
        d = quantizer.descriptor
        largest = None if seen is None else seen.channels.get(id(quantizer))
        if largest is None or not d.format.is_integer or d.format.bits > BYTE:
            continue
        if d.axis is not None or len(largest) < _FEWEST_CHANNELS:
            continue
        times = spread(largest)
        if times > _RULING:
            rulings.append(Ruling(path, int(largest.argmax()), times))
    return sorted(rulings, key=lambda ruling: -ruling.times)


@check("ruling_channel", needs_batches=True)
def ruling_channel(patient: Patient) -> Found:
    """Yield inputs of layers whose range one channel rules, with what heals that here."""
    for ruling in ruling_channels(patient):
        codes = 2 ** (BYTE - 1) / ruling.times
        evidence = (
            f"channel {ruling.channel} is {ruling.times:.0f} times the median one, which has "
            f"{codes:.1g} of 128 codes"
        )
        healing = patient.healed.get(ruling.path)
        if healing is None:
            remedy = (
                "ask again once the worst inputs are healed: they alone were measured"
            )
            yield "info", ruling.path, evidence, remedy
            continue
        severity: Severity = "warning" if healing.gain >= LEAST_GAIN else "info"
        remedy = healing.remedy(ruling.path.rpartition(".")[0], patient.target)
        yield severity, ruling.path, f"{evidence}; {healing}", remedy


@check("batchnorm_left", needs_batches=True)
def batchnorm_left(patient: Patient) -> Found:
    """Yield BatchNorms behind a quantized layer, which could have been folded into it."""
    assert patient.seen is not None
    for path, layer in patient.seen.norms.items():
        if not isinstance(patient.model.get_submodule(layer), QuantModule):
            continue
        evidence = (
            f"normalises the output of the quantized {layer}, at the cost of a float "
            "operator"
        )
        remedy = (
            "torchq.fuse_(model.eval(), batches[0])  # keeps the codes of the layer"
        )
        yield "warning", path, evidence, remedy


@check("damage", needs_batches=True)
def damage(patient: Patient) -> Found:
    """Yield that outputs are not those of the float model, with the cheapest cure."""
    outputs = patient.outputs
    if outputs is None or outputs.grade == "good":
        return
    says_nothing = not outputs.comparable or math.isnan(outputs.sqnr)
    if not patient.cures and says_nothing and outputs.score is None:
        return
    cure = patient.cures[0] if patient.cures else _own_formats(patient)
    severity: Severity = "warning" if outputs.grade == "poor" else "info"
    yield severity, "", f"{outputs.evidence}. {cure.text}", cure.code


def _own_formats(patient: Patient) -> Cure:
    """Return what may help where nothing cheaper does: a format for each layer."""
    bits = [
        (weight.numel(), quantizer.descriptor.format.bits)
        for quantizer, weight in quantized_weights(patient.model)
        if quantizer.quantizing
    ]
    count = sum(size for size, _ in bits)
    mean = sum(size * width for size, width in bits) / count if count else BYTE
    text = "Nothing cheap was found to help: give each layer its own format under a budget."
    return Cure(text, line_of_formats(mean))
