"""Finding the ranges: feed batches through a model and set every amax."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchq.calib import sync
from torchq.errors import CalibrationError, ConfigError
from torchq.graph import Forward, call_model
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import NotebookText, device_of, evaluating, progress_bar, table
from torchq.workflow.modes import quantizers, weight_quantizers

__all__ = ["CalibrationReport", "calibrate", "calibrate_weights"]

log = logging.getLogger(__name__)

OnUnseen = Literal["error", "disable", "dynamic"]


@dataclass(frozen=True)
class CalibrationReport(NotebookText):
    """What one call of :func:`calibrate` did.

    Attributes:
        batches: batches that ran through the model.
        ranges: path of each quantizer that got a range -> its smallest and its largest amax, or the
            ends of an asymmetric range.
        kept: paths of the quantizers that kept a range they had before.
        unseen: paths of the quantizers that no batch reached.
    """

    batches: int
    ranges: Mapping[str, tuple[float, float]]
    kept: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("quantizer", "amax")]
        for name, (smallest, largest) in self.ranges.items():
            one = smallest == largest
            rows.append((name, f"{largest:.4g}" if one else f"{smallest:.4g} .. {largest:.4g}"))
        rows += [(name, "no data reached it") for name in self.unseen]
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        end = f"{len(self.ranges)} ranges from {batches}"
        if self.kept:
            end += f", {len(self.kept)} kept from before"
        return f"{table(rows)}\n{end}"


def calibrate(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    method: str | None = None,
    forward: Forward | None = None,
    num_batches: int | None = None,
    on_unseen: OnUnseen = "error",
    force: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    progress: bool = True,
    **options: Any,
) -> CalibrationReport:
    """Set the range of every quantizer.

    Ranges of weights come from the weights, ranges of activations from ``batches``. The model
    runs in eval mode, without gradients and unquantized, and gets its modes back afterwards.
    Quantizers that are off stay off, and quantizers with dynamic ranges stay dynamic.

    Args:
        model: a quantized model.
        batches: each one holds the arguments of one call, perhaps followed by labels; see
            :func:`torchq.graph.call_arguments`. Tensors are moved to the model's device. None
            calibrates weights alone.
        method: how activations are calibrated, a name in :func:`torchq.calib.methods`. None
            takes the method of each descriptor.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        on_unseen: what happens to activation quantizers that no batch reached: ``"error"`` names
            them all, ``"disable"`` turns them off, ``"dynamic"`` lets them take the range of
            each call.
        force: replace ranges that are known already. Without it they are kept, with one warning.
        group: join the statistics of these processes (``torch.distributed.group.WORLD``), each
            with its own ``batches``: every rank gets the bits that one process would get from
            rank 0's batches, then rank 1's, and so on. Ranks may have different numbers of
            batches, even none, unless the model itself communicates (FSDP). Without a group each
            process calibrates on its own batches alone, with one warning if there are several.
        timeout: the seconds that a rank waits for the others of its group after its last batch.
        progress: show a bar (in a group, on its first rank).
        **options: for the calibrator, such as ``percentile=99.9`` or ``num_bins=4096``.

    Returns:
        A report of batches, ranges, and quantizers without data; ``print`` it.

    Raises:
        CalibrationError: A quantizer saw no data (``on_unseen="error"``), or NaN or infinite
            values, or there was no batch; the text names each quantizer, and the ranges of the
            others are set. Or a rank of the group did not arrive within the timeout.
        ConfigError: The model has no quantizers, or an argument is invalid.

    Anything else that ends the call, such as Ctrl-C or an error of the model, leaves every range
    as it was.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False))
        >>> report = torchq.quantize_(model)
        >>> print(torchq.calibrate(model, [torch.ones(2, 4)], progress=False).batches)
        1
    """
    _check_arguments(batches, on_unseen)
    model = _unwrapped(model)
    todo, kept = _pending(model, force)
    if batches is not None and group is None:
        _warn_of_other_ranks()
    weights, pending = weight_quantizers(model), {id(q) for q in todo.values()}
    activations = {name: q for name, q in todo.items() if id(q) not in weights}
    count, unseen = 0, list[str]()
    with _ranges_kept_on_interrupt(todo.values()), torch.no_grad():
        try:
            if batches is not None and (activations or group):
                stream = _Stream(batches, forward, num_batches, progress)
                count, unseen = _observe_batches(
                    model, activations, stream, group, timeout, (method, options)
                )
                _treat_unseen({n: activations[n] for n in unseen}, on_unseen, count)
        except CalibrationError:
            calibrate_weights(model, only=pending)
            raise
        # Weights come last: weight_norm and its like compute the weight in a forward pass.
        calibrate_weights(model, only=pending)
    ranges = {name: _bounds(q) for name, q in todo.items() if q.calibrated}
    return CalibrationReport(count, ranges, kept, tuple(unseen))


def calibrate_weights(model: nn.Module, *, only: set[int] | None = None) -> None:
    """Set the range of every weight quantizer from its weight; no data is needed.

    Args:
        model: a quantized model.
        only: ids of the quantizers to treat; None treats all that are on and not dynamic.

    Raises:
        CalibrationError: A weight holds NaN or infinity; the text names its quantizer.
    """
    for module in model.modules():
        if isinstance(module, QuantModule):
            for quantizer, weight in module.quantized_weights():
                chosen = (
                    quantizer.quantizing and not quantizer.descriptor.dynamic
                    if only is None
                    else id(quantizer) in only
                )
                if chosen:
                    quantizer.calibrate_on(weight)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model in a wrapper.

    The wrapper would exchange buffers in its first forward, and wait for a rank without a batch.
    """
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        model = model.module
    return model


def _check_arguments(batches: Iterable[Any] | None, on_unseen: str) -> None:
    if on_unseen not in ("error", "disable", "dynamic"):
        raise ConfigError(
            f"calibrate: got on_unseen={on_unseen!r}; expected 'error', 'disable' or 'dynamic'"
        )
    if isinstance(batches, (Tensor, Mapping, str)):
        kind = type(batches).__name__
        raise ConfigError(
            f"calibrate: got a {kind} as batches; expected an iterable of batches. "
            "Pass [batch] for one batch"
        )


def _warn_of_other_ranks() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"calibrate: this is one of {dist.get_world_size()} processes and uses its own "
            "batches alone, so each gets other ranges; pass "
            "group=torch.distributed.group.WORLD to join them, or a group of this process if that "
            "is meant",
            stacklevel=3,
        )


def _pending(model: nn.Module, force: bool) -> tuple[dict[str, TensorQuantizer], tuple[str, ...]]:
    """Name all quantizers; return those to calibrate, and the paths of those that keep a range.

    Known ranges that are kept give one warning.
    """
    known = quantizers(model)
    if not known:
        raise ConfigError(
            f"calibrate: {type(model).__name__} has no quantizer; expected a quantized model. "
            "Run torchq.quantize_(model) first"
        )
    for name, quantizer in known.items():
        quantizer.name = name
    live = {name: q for name, q in known.items() if q.quantizing and not q.descriptor.dynamic}
    fixed = {name for name, q in live.items() if q.descriptor.amax is not None}
    done = {name for name, q in live.items() if q.calibrated} - fixed
    if not force and (kept := _unexpected(live, done, weight_quantizers(model))):
        warnings.warn(
            f"calibrate: {len(kept)} quantizers are calibrated already and keep their ranges "
            f"({_listed(kept)}); force=True replaces them",
            stacklevel=3,
        )
    keep = fixed | (set() if force else done)
    return {n: q for n, q in live.items() if n not in keep}, tuple(n for n in live if n in keep)


def _unexpected(
    live: Mapping[str, TensorQuantizer], done: set[str], weights: Collection[int]
) -> set[str]:
    """Return the quantizers with known ranges that a caller may not expect.

    Where all weights and no inputs have ranges, an algorithm has set those of the weights.
    """
    of_inputs = {name for name, q in live.items() if id(q) not in weights}
    is_algorithm = of_inputs and done == live.keys() - of_inputs
    return set() if is_algorithm else done


def _listed(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (", ..." if len(ordered) > most else "")


@contextmanager
def _ranges_kept_on_interrupt(chosen: Iterable[TensorQuantizer]) -> Iterator[None]:
    """Give the quantizers their old ranges back, unless a CalibrationError ends the block."""
    before = [
        (q, q.ends() if q.calibrated else None, q.descriptor.unsigned, q.mode) for q in chosen
    ]
    try:
        yield
    except CalibrationError:
        raise
    except BaseException:
        for quantizer, ends, unsigned, mode in before:
            if ends is None:
                quantizer.forget_amax()
            else:
                quantizer.set_ends(ends)
            if quantizer.descriptor.unsigned != unsigned:
                quantizer.set_unsigned(unsigned)
            quantizer.mode = mode
        raise


@dataclass(frozen=True)
class _Stream:
    """The batches of one calibration and how they are run."""

    batches: Iterable[Any]
    forward: Forward | None
    num_batches: int | None
    progress: bool

    def run(self, model: nn.Module, show: bool) -> int:
        """Run ``model`` on every batch and return how many there were."""
        length = len(self.batches) if isinstance(self.batches, Sized) else None
        total = self.num_batches if length is None else length
        if length is not None and self.num_batches is not None:
            total = min(length, self.num_batches)
        device, count = device_of(model), 0
        unbounded = self.num_batches is None and (length is None or length > _MANY)
        text = "calibrate (all batches; num_batches=N stops earlier)" if unbounded else "calibrate"
        shown = progress_bar(
            islice(self.batches, self.num_batches),
            description=text,
            total=total,
            enabled=self.progress and show,
        )
        for batch in shown:
            call_model(model, batch, forward=self.forward, device=device)
            count += 1
        return count


#: A loader with more batches than this is offered a bound in the progress bar.
_MANY = 64


def _observe_batches(
    model: nn.Module,
    activations: dict[str, TensorQuantizer],
    stream: _Stream,
    group: dist.ProcessGroup | None,
    timeout: float,
    calibrators: tuple[str | None, dict[str, Any]],
) -> tuple[int, list[str]]:
    """Run the batches and set the ranges; return how many batches, and who saw nothing."""
    with torch.no_grad(), evaluating(model), _observing(model, activations, *calibrators):
        first = group is None or dist.get_rank(group) == 0
        count = stream.run(model, first) if activations else 0
        if group is not None:
            named = [(name, c) for name, q in activations.items() for c in q.calibrators]
            observers, names = [c for _, c in named], [name for name, _ in named]
            sync(observers, group, timeout=timeout, names=names)
        elif not count:
            raise CalibrationError(
                "calibrate: got no batch; expected at least one. A generator runs only once: "
                "make a new one"
            )
        return count, _set_ranges(activations)


@contextmanager
def _observing(
    model: nn.Module,
    chosen: dict[str, TensorQuantizer],
    method: str | None,
    options: dict[str, Any],
) -> Iterator[None]:
    """Let the chosen quantizers observe and none of the model quantize.

    Afterwards all are as they were, but for their ranges.
    """
    before = [(q, q.mode) for q in quantizers(model).values()]
    try:
        for quantizer in chosen.values():
            quantizer.start_calibration(method, **options)
        for quantizer, _ in before:
            quantizer.quantizing = False
        yield
    finally:
        for quantizer, mode in before:
            quantizer.mode = mode
        for quantizer in chosen.values():
            quantizer.calibrator = None


def _set_ranges(chosen: dict[str, TensorQuantizer]) -> list[str]:
    """Set every range from what was observed; return the names of those that saw nothing."""
    unseen, failed = [], []
    for name, quantizer in chosen.items():
        if quantizer.calibrator is None or not quantizer.calibrator.seen:
            unseen.append(name)
            continue
        try:
            quantizer.finish_calibration()
        except CalibrationError as error:
            failed.append(str(error))
    if failed:
        raise CalibrationError("calibrate: " + "; ".join(failed))
    return unseen


def _treat_unseen(unseen: dict[str, TensorQuantizer], on_unseen: OnUnseen, count: int) -> None:
    log.debug("calibrated on %d batches, unseen: %s", count, list(unseen))
    if unseen and on_unseen == "error":
        raise CalibrationError(
            f"calibrate: no tensor reached {', '.join(unseen)} in {count} batches; expected every "
            "quantizer to see data. Pass on_unseen='disable' or 'dynamic', or batches that use "
            "these branches; a layer whose parent reads its weight without calling it belongs in "
            "exclude"
        )
    if on_unseen == "disable":
        for quantizer in unseen.values():
            quantizer.mode = "off"


def _bounds(quantizer: TensorQuantizer) -> tuple[float, float]:
    if quantizer.amax.is_meta:
        return float("nan"), float("nan")
    smallest, largest = torch.aminmax(torch.cat([end.flatten() for end in quantizer.ends()]))
    return float(smallest), float(largest)
