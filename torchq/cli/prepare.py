"""From the arguments of a command to a quantized model and batches."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from torchq.cli.loading import Images, load_batches, load_model, load_object
from torchq.errors import ConfigError

__all__ = [
    "Prepared",
    "accuracy",
    "example_of",
    "named_config",
    "prepare",
    "quiet",
    "read_batches",
    "read_metric",
    "read_model",
    "require",
    "selection",
]

_EXPECTED = {
    "model": "--model is missing; expected torchvision:NAME, package.module:factory or a file",
    "data": "--data is missing; expected a folder of images or package.module:loader",
    "metric": "--metric is missing; expected package.module:function",
    "max_drop": "--max-drop is missing; expected the largest loss of the metric, such as 0.01",
}


@dataclass
class Prepared:
    """What a command works on.

    Attributes:
        model: quantized and calibrated.
        example: the input of the first batch.
        calibration: the batches that ranges come from.
        held_out: batches after these, or the same where there are no more.
    """

    model: nn.Module
    example: Tensor
    calibration: list[Any]
    held_out: list[Any]

    @property
    def is_held_out(self) -> bool:
        """True if the model was not calibrated on the batches to compare on."""
        return self.held_out is not self.calibration


def quiet(text: object) -> None:
    """Print nothing: the result alone belongs on standard output."""


def require(args: argparse.Namespace, *names: str) -> None:
    """Raise one error that names everything that is missing.

    Args:
        args: the arguments of a command.
        names: those that it cannot do without.

    Raises:
        ConfigError: One is missing.
    """
    missing = [_EXPECTED[name] for name in names if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"{'; '.join(missing)}. See torchq {args.command} --help")


def read_model(args: argparse.Namespace) -> nn.Module:
    """Return the float model on its device.

    Raises:
        ConfigError: There is no such model, or no such device.
    """
    model = load_model(args.model, args.weights)
    try:
        return model.to(args.device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"--device {args.device}: {_first_line(error)}") from None


def named_config(recipe: str) -> torchq.QuantConfig:
    """Return a recipe by name, or the content of a configuration file.

    Raises:
        ConfigError: There is no such recipe or file.
    """
    if recipe.endswith(".json"):
        try:
            return torchq.QuantConfig.from_json(Path(recipe).read_text())
        except FileNotFoundError:
            raise ConfigError(f"--recipe {recipe}: no such file") from None
    return torchq.recipes.by_name(recipe)


def selection(args: argparse.Namespace) -> dict[str, Any]:
    """Return the patterns of a command, as arguments of :func:`torchq.plan`."""
    return {"include": args.include, "exclude": args.exclude}


def read_metric(args: argparse.Namespace) -> Any:
    """Return the metric that was asked for, or None."""
    if args.metric is not None:
        return load_object(args.metric, "--metric")
    return accuracy if args.labels else None


def accuracy(output: Any, batch: Any) -> Tensor:
    """Return the share of images whose largest score is that of their label."""
    return (output.argmax(1).cpu() == batch[1].cpu()).float().mean()


def read_batches(args: argparse.Namespace, count: int) -> list[Any]:
    """Return the first ``count`` batches.

    Raises:
        ConfigError: There is none.
    """
    images = Images(args.batch_size, args.image_size, args.mean, args.std, args.seed)
    labelled = getattr(args, "labels", False)
    source: Iterable[Any] = load_batches(args.data, images, labelled=labelled)
    found = list(islice(source, count))
    if not found:
        raise ConfigError("--data: got no batch; expected at least one")
    return found


def example_of(batch: Any) -> Tensor:
    """Return the input tensor of a batch; the export traces with it.

    Raises:
        ConfigError: There is none.
    """
    first = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(first, Tensor):
        raise ConfigError(
            f"--data: got batches of {type(batch).__name__}; expected a tensor or (tensor, ...)"
        )
    return first


def prepare(
    args: argparse.Namespace,
    *,
    say: Callable[[object], None],
    held_out: int,
    check: Callable[[], None] = lambda: None,
) -> Prepared:
    """Load, fuse, quantize and calibrate a model.

    Args:
        args: of a command with the shared options.
        say: prints progress; some commands print JSON alone.
        held_out: batches to keep for a comparison.
        check: called once model and recipe are read, before any other work.

    Raises:
        ConfigError: Something does not fit; the text names the option.
    """
    if args.model is None:
        require(args, "model", "data")
    model = read_model(args)
    config = named_config(args.recipe)
    require(args, "data")
    check()
    batches = read_batches(args, args.num_batches + held_out)
    count = _calibration_count(len(batches), args.num_batches, held_out)
    calibration, rest = batches[:count], batches[count:]
    example = example_of(batches[0]).to(args.device)
    _check_example(model, example, args)
    if args.fuse:
        fused = torchq.fuse_(model, (example[:1],)).fused
        say(f"fused {len(fused)} BatchNorms and branches")
    # A target wants one range for all quantizers of one tensor, which the example call finds.
    one = None if args.target is None else (example[:1],)
    say(torchq.quantize_(model, config, target=args.target, example=one, **selection(args)))
    if getattr(args, "load", None):
        torchq.load(model, args.load)
        return Prepared(model, example, calibration, rest or calibration)
    if getattr(args, "export", None):
        torchq.onnx.preflight.check_formats(model)
    started = time.perf_counter()
    torchq.calibrate(model, calibration, method=args.calib, on_unseen=args.on_unseen)
    say(f"calibrated on {_counted(calibration)} in {time.perf_counter() - started:.1f} s")
    return Prepared(model, example, calibration, rest or calibration)


def _calibration_count(batches: int, wanted: int, held_out: int) -> int:
    """Return how many batches to calibrate on: of short data a quarter stays for the comparison."""
    kept = min(held_out, max(1, batches // 4)) if batches > 1 else 0
    return min(wanted, batches - kept)


def _counted(batches: list[Any]) -> str:
    return "1 batch" if len(batches) == 1 else f"{len(batches)} batches"


def _check_example(model: nn.Module, example: Tensor, args: argparse.Namespace) -> None:
    """Run the model once, so that images of the wrong size are found before all other work.

    Raises:
        ConfigError: The model fails on the first batch.
    """
    try:
        with torch.no_grad():
            model(example[:1])
    except Exception as error:  # whatever the model's code raises
        advice = "; pass another --image-size" if Path(args.data).is_dir() else ""
        raise ConfigError(
            f"--data {args.data}: the model fails on a batch of shape {tuple(example.shape)} "
            f"({type(error).__name__}: {_first_line(error)}){advice}"
        ) from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
