"""Finding the ranges: feed batches through a model and set every amax."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
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
from torchq.utils import device_of, evaluating, progress_bar
from torchq.workflow.modes import quantizers, weight_quantizers

__all__ = ["calibrate", "calibrate_weights"]

log = logging.getLogger(__name__)

OnUnseen = Literal["error", "disable", "dynamic"]


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
) -> None:
    """Set the range of every quantizer: of weights from the weights themselves, of activations from ``batches``.

    The model runs in eval mode, without gradients and unquantized, and gets its modes back afterwards. Quantizers that are
    off stay off and are left alone, dynamic ones too.

    Args:
        model: a quantized model.
        batches: each holds the arguments of one call, perhaps followed by labels; see
            :func:`torchq.graph.call_arguments`. Tensors are moved to the model's device. None
            calibrates weights alone.
        method: how activations are calibrated, a name in :func:`torchq.calib.methods`; default each descriptor's.
        forward: called as ``forward(model, batch)`` instead.
        num_batches: stop after so many.
        on_unseen: for activation quantizers that no batch reached: ``"error"`` names them all, ``"disable"`` turns them off,
            ``"dynamic"`` lets them take the range of each call.
        force: replace ranges that are known already. Without it they are kept, with one warning.
        group: join the statistics of these processes (``torch.distributed.group.WORLD``), each with its own ``batches``: every
            rank gets the bits that one process would get from rank 0's batches, then rank 1's, and so on. Ranks may have
            different numbers of batches, even none, unless the model itself communicates (FSDP). Without it each process
            calibrates on its own batches alone, with one warning where there are several.
        timeout: seconds that a rank waits for the others of its group once it is through its batches.
        progress: show a bar (in a group, on its first rank).
        **options: for the calibrator, such as ``percentile=99.9`` or ``num_bins=4096``.

    Raises:
        CalibrationError: unseen quantizers (``on_unseen="error"``), NaN or infinite activations, no batch at all; the text
            names each quantizer. Ranges of the others are set. A rank of the group that did not arrive within the timeout.
        ConfigError: the model has no quantizers, or an argument is invalid.

    Anything else that ends it, Ctrl-C or an error of the model, leaves every range as it was.
    """
    _check_arguments(batches, on_unseen)
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        model = model.module  # the wrapper would exchange buffers in its first forward, and wait for a rank without batches
    todo = _pending(model, force)
    if batches is not None and group is None:
        _warn_of_other_ranks()
    weights = weight_quantizers(model)
    activations = {name: q for name, q in todo.items() if id(q) not in weights}
    try:
        if batches is not None and (activations or group):
            with (
                torch.no_grad(),
                evaluating(model),
                _observing(model, activations, method, options),
            ):
                first = group is None or dist.get_rank(group) == 0
                count = (
                    _feed(model, batches, forward, num_batches, progress and first)
                    if activations
                    else 0
                )
                if group is not None:
                    sync(
                        [q.calibrator for q in activations.values() if q.calibrator],
                        group,
                        timeout=timeout,
                        names=tuple(activations),
                    )
                elif not count:
                    raise CalibrationError(
                        "calibrate: got no batch; expected at least one. A generator runs only once: make a new one"
                    )
                unseen = _finish(activations)
            _treat_unseen({name: activations[name] for name in unseen}, on_unseen, count)
    except CalibrationError:
        _calibrate_pending_weights(model, todo)
        raise
    _calibrate_pending_weights(
        model, todo
    )  # last: weight_norm and its like compute the weight in a forward pass


def _check_arguments(batches: Iterable[Any] | None, on_unseen: str) -> None:
    if on_unseen not in ("error", "disable", "dynamic"):
        raise ConfigError(
            f"calibrate: got on_unseen={on_unseen!r}; expected 'error', 'disable' or 'dynamic'"
        )
    if isinstance(batches, (Tensor, Mapping, str)):
        kind = type(batches).__name__
        raise ConfigError(
            f"calibrate: got a {kind} as batches; expected an iterable of batches. Pass [batch] for one batch"
        )


def _calibrate_pending_weights(model: nn.Module, todo: dict[str, TensorQuantizer]) -> None:
    with torch.no_grad():
        calibrate_weights(model, only={id(q) for q in todo.values()})


def _warn_of_other_ranks() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"calibrate: this is one of {dist.get_world_size()} processes and uses its own batches alone, so each gets other ranges; pass "
            "group=torch.distributed.group.WORLD to join them, or a group of this process if that is meant",
            stacklevel=3,
        )


def _treat_unseen(unseen: dict[str, TensorQuantizer], on_unseen: OnUnseen, count: int) -> None:
    log.debug("calibrated on %d batches, unseen: %s", count, list(unseen))
    if unseen and on_unseen == "error":
        raise CalibrationError(
            f"calibrate: no tensor reached {', '.join(unseen)} in {count} batches; expected every quantizer to see data. "
            "Pass on_unseen='disable' or 'dynamic', or batches that use these branches; a layer whose parent reads its weight without "
            "calling it belongs in exclude"
        )
    if on_unseen == "disable":
        for quantizer in unseen.values():
            quantizer.mode = "off"


def _pending(model: nn.Module, force: bool) -> dict[str, TensorQuantizer]:
    """The quantizers to calibrate, named; warns about known ranges that are kept."""
    known = quantizers(model)
    if not known:
        raise ConfigError(
            f"calibrate: {type(model).__name__} has no quantizer; expected a quantized model. Run torchq.quantize_(model) first"
        )
    for name, quantizer in known.items():
        quantizer.name = name
    live = {name: q for name, q in known.items() if q.quantizing and not q.descriptor.dynamic}
    fixed = {name for name, q in live.items() if q.descriptor.amax is not None}
    done = {name for name, q in live.items() if q.calibrated} - fixed
    if done and not force:
        warnings.warn(
            f"calibrate: {len(done)} quantizers are calibrated already and keep their ranges ({_listed(done)}); force=True replaces them",
            stacklevel=3,
        )
    keep = fixed | (set() if force else done)
    return {name: q for name, q in live.items() if name not in keep}


def calibrate_weights(model: nn.Module, *, only: set[int] | None = None) -> None:
    """Set the range of every weight quantizer from its weight; no data is needed.

    Args:
        only: ids of the quantizers to treat; default all that are on and not dynamic.

    Raises:
        CalibrationError: a weight holds NaN or infinity; the text names its quantizer.
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


@contextmanager
def _observing(
    model: nn.Module,
    chosen: dict[str, TensorQuantizer],
    method: str | None,
    options: dict[str, Any],
) -> Iterator[None]:
    """The chosen quantizers observe and none of the model quantizes; afterwards all are as before, but for the ranges."""
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


def _feed(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None,
    num_batches: int | None,
    progress: bool,
) -> int:
    device = device_of(model)
    total = len(batches) if isinstance(batches, Sized) else None
    if num_batches is not None:
        total = num_batches if total is None else min(total, num_batches)
    count = 0
    for batch in progress_bar(
        islice(batches, num_batches), description="calibrate", total=total, enabled=progress
    ):
        call_model(model, batch, forward=forward, device=device)
        count += 1
    return count


def _finish(chosen: dict[str, TensorQuantizer]) -> list[str]:
    """Set every range; the names of the quantizers that saw nothing."""
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


def _listed(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (", ..." if len(ordered) > most else "")
