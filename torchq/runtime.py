"""What a runtime is: the program that runs a quantized model, and all that torchq knows of it.

The type stands low, as plans read where a runtime wants quantizers. :mod:`torchq.runtimes` has the
runtimes, one file each, which enter the registry when they are imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from torchq import recipes
from torchq.config import QuantConfig
from torchq.errors import ConfigError
from torchq.functional import QParams
from torchq.functional.windows import Windows
from torchq.utils import Registry, short_repr, table

#: Writes a calibrated model, traced with an example, to a file; returns what ``print`` shows of it.
Writer = Callable[[nn.Module, Any, Path], Any]


#: A planning pass: the plan so far and the facts about a model -> the plan. The types are those
#: of :mod:`torchq.swap`, where shared passes are; those of one runtime stand in its folder.
PlanPass = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Placement:
    """Where a runtime wants quantizers, beside the inputs of layers.

    Attributes:
        operators: Kinds of operators whose inputs are quantized: "add", "mul", "matmul",
            "attention", "cat", "pool", "activation". All but matrix multiplications are quantized
            in modules that hold a convolution only: between linear layers and norms these
            quantizers cost more than they save.
        modules: Patterns of modules without weights whose input is quantized.
    """

    operators: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Codes:
    """The codes of activations that a runtime has. Models are planned with these.

    Attributes:
        unsigned: Tensors without negative values have unsigned codes, which begin at 0. False: no
            tensor has.
        stored: ``"unsigned"``: files hold unsigned integers for all tensors. Signed codes are moved
            by half their number then, which changes no value.
        widths: Bits of the activations that this is about.
        zero_points: Codes may have a zero point, which asymmetric ranges need.
        fitted: Tensors that may be negative have such a range, unless a rule fixes their form.
        signed_factors: What products multiply that have no weight, as those of attention, has no
            zero point, also where other tensors are fitted: signed codes where no operator shows
            that no value is negative.
        scales: The name of the type that files have scales in, those of weights too: one of
            :data:`torchq.formats.SCALE_TYPES`. None for float32.
        int32_biases: Integer kernels add biases as int32, in units of the scale of the input times
            that of the weight.
        by_channel: Kernels of depthwise convolutions read a tensor without negative values with a
            scale for each channel: what they multiply a channel by knows its scale.
    """

    unsigned: bool = True
    stored: Literal["", "unsigned"] = ""
    widths: tuple[int, ...] = (8,)
    zero_points: bool = True
    fitted: bool = False
    signed_factors: bool = False
    scales: str | None = None
    int32_biases: bool = False
    by_channel: bool = False


@dataclass(frozen=True, eq=False)
class LayerNumbers:
    """The numbers of a layer with a weight, as integer kernels that add float biases have them.

    Attributes:
        of: the codes of the input.
        weight: the codes of the weight, (out, in / groups, ...).
        scale: those of the weight, (out,).
        bias: (out,), or None.
        to: the codes of the result; None for a float result.
        from_zero: ``"input"`` and ``"result"`` where a ReLU in front of these codes lets a kernel
            store them from 0.
    """

    of: QParams
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    to: QParams | None
    from_zero: tuple[str, ...]


#: Makes of the numbers of a layer the function that turns its exact sums, of codes less their zero
#: points, into its results, in place.
Finishes = Callable[[LayerNumbers], Callable[[Tensor], Tensor]]
#: ``float_products(step, bias)``: the function of exact sums, in units of ``step``, in place, that
#: gives float results.
FloatProducts = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
#: ``product(x, weight, bias, multiply)``: the result of a layer in float, with ``multiply(x,
#: weight, bias)`` as torch computes it.
ValuesProduct = Callable[
    [
        Tensor,
        Tensor,
        Tensor | None,
        Callable[[Tensor, Tensor, Tensor | None], Tensor],
    ],
    Tensor,
]


class CodeBiases(Protocol):
    """The formulas of layers whose kernels add biases as codes, and round sums once.

    ``step`` is the scale of the input times those of the weight, as it broadcasts against the sums.
    """

    def bias_codes(self, bias: Tensor, step: Tensor) -> Tensor:
        """Return what is added to the sums in place of a float bias."""

    def rounds_products(self, step: Tensor, to: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function of exact sums, in place, that gives values of codes of a scale."""


class OperatorFormulas(Protocol):
    """The formulas of operators beside layers."""

    def adds(
        self, first: QParams, second: QParams, to: QParams
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function of two tensors of codes that gives the codes of their sum.

        It may write to both.
        """

    def averages(
        self, of: QParams, to: QParams, windows: Windows
    ) -> Callable[[Tensor], Tensor] | None:
        """Return the function of codes, which it may write to, that gives the means over windows.

        These are values of codes, or floats that who reads them rounds. None where the kernel is
        not known.
        """

    def multiplies(
        self, first: QParams, second: QParams, to: QParams
    ) -> Callable[[Tensor], Tensor]:
        """Return the function of products of two codes, in place, that gives codes of values."""

    def sigmoid(self, of: QParams, to: QParams) -> Tensor | None:
        """Return the code of the sigmoid of each code, the smallest first; None if not known."""


class Arithmetic(Protocol):
    """How the integer kernels of a runtime round: its formulas, on whole numbers in float32.

    Codes are less their zero points here, and are not clamped to the ends of their type: who reads
    them does that. A part that is None has no kernels, and what asks for it is simulated.
    """

    @property
    def divides(self) -> bool:
        """Codes of floats are made by a division by the scale; else by its reciprocal."""

    @property
    def code_biases(self) -> CodeBiases | None:
        """How layers round to codes whose kernels add biases as codes."""

    @property
    def finishes(self) -> Finishes | None:
        """How all sums of layers become results whose kernels add float biases."""

    @property
    def float_products(self) -> FloatProducts | None:
        """How exact sums become float results."""

    @property
    def values_product(self) -> ValuesProduct | None:
        """How a layer with a float result multiplies values of codes, where it takes no codes."""

    @property
    def multiplies_matrices(self) -> bool:
        """Products of two activations are computed on integers, as layers without a bias are."""

    @property
    def operators(self) -> OperatorFormulas | None:
        """How operators beside layers are computed."""


@dataclass(frozen=True)
class LayerBound:
    """How far the codes of a layer may be off in a runtime that is given equal codes.

    Attributes:
        share: how many of the codes may be other ones.
        steps: by how much.
    """

    share: float = 0.0
    steps: int = 1


#: The operators of ONNX files that multiply and add.
PRODUCTS = frozenset(["Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum"])


@dataclass(frozen=True)
class FileRules:
    """What a runtime that reads ONNX files wants in them.

    Attributes:
        passes: Rewritings of the graph in place, in order.
        checks: Rules of the runtime: each yields a sentence for each place where a graph breaks it,
            with the layer and a fix. A finding is a warning of the export.
        float_types: Types of parameters that the runtime has kernels for.
        notes: Returns sentences for the report of an export, from the graph and the path.

    Passes find the runtime in ``model.meta["runtime"]``, and under ``"feeds"`` a function that
    returns the tensors of the example by the names of inputs.
    """

    passes: tuple[Callable[[Any], None], ...] = ()
    checks: tuple[Callable[[Any], Iterable[str]], ...] = ()
    float_types: tuple[torch.dtype, ...] = (torch.float32, torch.float16)
    notes: Callable[[Any, Path], Iterable[str]] | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Runtime:
    """The program that runs a quantized model: all that torchq knows about it, and its settings.

    ``dataclasses.replace`` returns one with other settings. Those that run models in this process
    derive from :class:`torchq.runtimes.Engine`.

    Args:
        name: The word of ``target=``.
        recipe: Returns the configuration of :func:`torchq.quantize_` where none is given.
        placement: Where it wants quantizers beside the inputs of layers; None for nowhere.
        adapting: Planning passes that change what the rules decide, before the model is looked
            at quantized: what its kernels cannot take of a layer. See :mod:`torchq.swap.layers`.
        planning: Planning passes that read what a run on the example shows, after operators that
            nobody reaches were left float and before ranges are shared. See
            :mod:`torchq.swap.passes`.
        judging: Planning passes at the end, which change no quantizer: they mark the layers that
            its kernels compute in float although they are quantized.
        kernels: What its integer kernels do beside what all do. ``"rows"``: linear layers on more
            than rows, (N, ..., in), round results with a bias too. ``"clips"``: results are clipped
            at the ends of a ReLU or ReLU6 behind them, whatever their codes. ``"moves"``: a result
            may be read at once and behind a view. ``"transposed"``: there are some for transposed
            convolutions without groups. ``"layers alone"``: there are none for operators, biases
            are float, and max pools take the codes in front of them.
        float_before_norms: The operators of files that it computes in float although they read
            codes, where a BatchNorm follows that was not folded. Of others it fuses the BatchNorm
            by itself, or its kernel returns floats.
        computes_floats: Its kernels compute in float what is not quantized, so that calibration may
            leave operators beside layers so, and planning the last layers of a detector.
        codes: The codes of activations that it has; None takes any.
        file: How ONNX files for it look; None where it reads none. ``FileRules()`` is plain.
        limits: Sentences about what it does not do, which nothing can see in a file.
        versions: What the figures and the rules were found with.
        proved: How far it is proved that this runtime computes the simulation. ``"equal codes"``:
            in whole networks. ``"per layer"``: of layers that are given equal inputs.
            ``"per layer, emulated"``: the same on its maker's emulator, and it was not run.
            ``"structure alone"``: files keep its rules, and it was not run. ``"numbers alone"``:
            there are no files for it.
        packages: Those that it needs beside torch.
        timer: The command of its maker that times a file on another machine, with ``{file}`` for
            its name.
        session: Opens an ONNX file as ``session(path, optimize=...)``, to run it tensor by tensor:
            :func:`torchq.verify_onnx` compares files of all runtimes so.

    Example:
        >>> torchq.runtimes.RUNTIMES["rknn"]
        Runtime(name='rknn')
    """

    #: What ``pip install torchq[...]`` installs its packages.
    extra: ClassVar[str] = ""
    name: str
    recipe: Callable[[], QuantConfig] = recipes.int8
    placement: Placement | None = None
    adapting: tuple[PlanPass, ...] = ()
    planning: tuple[PlanPass, ...] = ()
    judging: tuple[PlanPass, ...] = ()
    kernels: frozenset[str] = frozenset()
    float_before_norms: frozenset[str] = PRODUCTS
    computes_floats: bool = True
    codes: Codes | None = None
    file: FileRules | None = None
    limits: tuple[str, ...] = ()
    versions: str = ""
    proved: str = "numbers alone"
    packages: tuple[str, ...] = ()
    timer: str = ""
    session: Callable[..., object] | None = None

    @property
    def plans(self) -> bool:
        """True if a model for this runtime is quantized in another way than one for none."""
        return self.placement is not None or self.recipe is not recipes.int8

    @property
    def arithmetic(self) -> Arithmetic | None:
        """The formulas of its integer kernels, by which evaluation computes its codes, if known."""
        return None

    @property
    def widest_inputs(self) -> int:
        """The most bits of the codes of activations that it is known to take."""
        return 8 if self.codes is None else max(self.codes.widths)

    @property
    def here(self) -> bool:
        """True if its kernels can run models on this machine now."""
        return False

    def writers(self) -> Mapping[str, Writer]:
        """Return the endings of files of this runtime's own, beside ONNX, and what writes one.

        That is a function of the folder of the runtime, or a method of the runtime itself; advice
        names it, see :meth:`writing_line`.
        """
        return {}

    def writing_line(self, ending: str) -> str:
        """Return the line that writes a file of this runtime's own, with an ending, from a model.

        It is for the names ``model``, ``example`` and ``path``.
        """
        writer: Any = self.writers()[ending]
        if getattr(writer, "__self__", None) is self:
            owner = f"{_public_place(type(self))}.{self!r}"
        else:
            owner = _folder(writer)
        return f"{owner}.{writer.__name__}(model, example, path)"

    def opened(
        self, path: Path
    ) -> Callable[[Mapping[str, Tensor]], list[Tensor]] | None:
        """Return an ONNX file as a function of its inputs; None where this runtime is not here."""
        return None

    @property
    def emulates(self) -> str:
        """The chip that :meth:`emulated` runs files on; empty for a runtime without an emulator."""
        return ""

    def emulated(self, path: Path) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
        """Return an ONNX file as a function of its inputs, on an emulator of the chip.

        :func:`torchq.verify_onnx` asks for it by ``target=`` alone, as it takes long.

        Raises:
            MissingExtraError: the package of the emulator is not installed.
        """
        raise NotImplementedError

    def bound(self, quantize: object) -> LayerBound:
        """Return how far the emulator's codes of a QuantizeLinear may be off."""
        return LayerBound()

    def excuse(self) -> str:
        """Return why right files with 8-bit weights may give wrong results on this machine."""
        return ""

    def _settings(self) -> dict[str, Any]:
        """Return the fields that are not what the class says."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: v for n, v in values.items() if v != getattr(type(self), n, None)}

    def __repr__(self) -> str:
        known = {field.name for field in fields(Runtime)} - {"name"}  # rules are long
        settings = [
            (name, v) for name, v in self._settings().items() if name not in known
        ]
        shown = ", ".join(f"{name}={short_repr(value)}" for name, value in settings)
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Settings alone: a deployed model that was saved keeps no functions of today's rules.
        return _made, (type(self), self._settings())


def _folder(thing: Any) -> str:
    """Return the package that a function or class stands in a module of."""
    return str(thing.__module__.rpartition(".")[0] or thing.__module__)


def _public_place(cls: type[Runtime]) -> str:
    """Return where a class of runtimes is imported from; those of torchq have one place."""
    first, _, rest = cls.__module__.partition(".runtimes.")
    return f"{first}.runtimes" if rest else cls.__module__


def _made(cls: type[Runtime], settings: dict[str, Any]) -> Runtime:
    return cls(**settings)


#: Name -> runtime.
RUNTIMES: Registry[str, Runtime] = Registry("target", filled_by="torchq.runtimes")


def reference_runtime() -> Runtime:
    """Return the runtime that runs any file here, node by node, whatever it is for."""
    return next(runtime for runtime in RUNTIMES.values() if runtime.session is not None)


def open_session(
    path: str | os.PathLike[str], *, optimize: bool, **options: object
) -> Any:
    """Return a file in the reference, with ``inputs``, ``outputs``, ``feeds`` and ``run``.

    ``save_optimized=`` is where to write what the reference makes of it.
    """
    open_file = reference_runtime().session
    assert open_file is not None
    return open_file(path, optimize=optimize, **options)


#: What may be proved of a runtime, the most first.
_PROOFS = (
    "equal codes",
    "per layer",
    "per layer, emulated",
    "structure alone",
    "numbers alone",
)


class Targets(tuple[str, ...]):
    """The names of the runtimes, in order; printed, a table of each, those proved most first."""

    __slots__ = ()

    def __repr__(self) -> str:
        heading = ("target", "tried with", "formats", "grid", "proved", "extra", "here")
        note = (
            "formats and grid: activations x weights, where no configuration is given"
        )
        runtimes = sorted((RUNTIMES[name] for name in self), key=_proof)
        return table([heading, *map(_row, runtimes)], note)


def _proof(runtime: Runtime) -> int:
    """Return how many proofs say more of a runtime than its own; others are the least."""
    return _PROOFS.index(runtime.proved) if runtime.proved in _PROOFS else len(_PROOFS)


def _row(runtime: Runtime) -> tuple[str, ...]:
    """Return what the table of targets says of a runtime, by its first rule."""
    first = runtime.recipe().rules[0]
    input, weight = first.input, first.weight
    assert input is not None and weight is not None
    types = [str(d.format).removesuffix("_narrow") for d in (input, weight)]
    codes = runtime.codes
    chosen = (
        codes is not None and codes.unsigned and input.symmetric and not input.unsigned
    )
    moved = chosen and codes is not None and codes.fitted
    if moved:
        types[0] = f"u{types[0]}"
    elif chosen or input.unsigned == "auto":
        types[0] += f"/u{types[0]}"
    scales = None if runtime.codes is None else runtime.codes.scales
    grid = {
        "zero points": moved or not input.symmetric,
        "powers of two": input.power_of_two,
        "from -127": input.narrow_range,
        f"{scales} scales": scales is not None,
        "per channel": weight.axis is not None,
        input.rounding.replace("_", " "): input.rounding != "half_even",
    }
    return (
        runtime.name,
        runtime.versions,
        " x ".join(types),
        ", ".join(name for name, on in grid.items() if on),
        runtime.proved,
        runtime.extra if runtime.packages else "",
        "yes" if runtime.here else "no",
    )


def targets() -> Targets:
    """Return the names of the runtimes that ``target=`` accepts; printed, what each one is.

    Example:
        >>> "openvino" in torchq.targets()
        True
    """
    return Targets(sorted(RUNTIMES))


def runtime_of(target: str | Runtime | None) -> Runtime | None:
    """Return the runtime that ``target=`` means; ConfigError for an unknown one."""
    if target is None or isinstance(target, Runtime):
        return target
    if not isinstance(target, str):
        raise ConfigError(
            f"target: got {short_repr(target)}; expected one of torchq.targets(), or an object of "
            "torchq.runtimes"
        )
    return RUNTIMES[target]


#: The attributes of a model that name the runtime it was quantized for, and its settings.
_ATTRIBUTE, _SETTINGS = "_torchq_target", "_torchq_target_settings"
#: The attribute that holds a runtime which no name finds.
_UNREGISTERED = "_torchq_unregistered_target"
_PLAIN = (str, bool, int, float)


def is_registered(runtime: Runtime) -> bool:
    """Return True if its name finds a runtime that is this one up to settings."""
    registered = RUNTIMES.get(runtime.name)
    return registered is not None and type(registered) is type(runtime)


def settings_of(runtime: Runtime | None) -> dict[str, Any]:
    """Return the settings of a runtime that are others than those of the registered one."""
    if runtime is None or not is_registered(runtime):
        return {}
    registered = RUNTIMES[runtime.name]
    names = [one.name for one in fields(registered)]
    own = {name: getattr(runtime, name) for name in names}
    usual = {name: getattr(registered, name) for name in names}
    return {n: v for n, v in own.items() if v != usual[n] and isinstance(v, _PLAIN)}


def runtime_with(name: str | None, settings: Mapping[str, Any]) -> Runtime | None:
    """Return the registered runtime of a name with other settings; None for an unknown name.

    Raises:
        ConfigError: It has no such settings.
    """
    registered = None if name is None else RUNTIMES.get(name)
    if registered is None or not settings:
        return registered
    try:
        return replace(registered, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"load: settings: got {short_repr(dict(settings))} for {name!r} ({error}); expected "
            "settings that it has. The file is damaged"
        ) from None


def remember_target(model: nn.Module, runtime: Runtime | None) -> None:
    """Keep with a model which runtime it is quantized for, with its settings; None forgets it.

    A runtime that is not registered is kept itself, as its name does not find it.
    """
    vars(model).pop(_ATTRIBUTE, None)
    vars(model).pop(_SETTINGS, None)
    vars(model).pop(_UNREGISTERED, None)
    if runtime is not None:
        vars(model)[_ATTRIBUTE] = runtime.name
        if not is_registered(runtime):
            vars(model)[_UNREGISTERED] = runtime
        if settings := settings_of(runtime):
            vars(model)[_SETTINGS] = settings


def planned_runtime(model: nn.Module) -> Runtime | None:
    """Return the runtime that a model was quantized for, with its settings; None for none."""
    unregistered: Runtime | None = vars(model).get(_UNREGISTERED)
    if unregistered is not None:
        return unregistered
    return runtime_with(planned_target(model), vars(model).get(_SETTINGS, {}))


def planned_target(model: nn.Module) -> str | None:
    """Return the name of the runtime that a model was quantized for; None for none, or unknown."""
    return vars(model).get(_ATTRIBUTE)


def check_planned(caller: str, model: nn.Module, runtime: Runtime | None) -> None:
    """Raise ConfigError if a model was quantized for another runtime, in another way."""
    name = planned_target(model)
    planned = None if name is None else RUNTIMES.get(name)
    if planned is None or runtime is None or name == runtime.name:
        return
    if planned.plans and runtime.plans:
        raise ConfigError(
            f"{caller}: got target={runtime.name!r} for a model that was quantized for {name!r}; "
            f"expected {name!r}. To plan again, call torchq.restore_(model), "
            f"torchq.quantize_(model, target={runtime.name!r}, example=...) and torchq.calibrate"
        )
