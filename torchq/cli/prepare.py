"""From the arguments of a command to a quantized model and batches."""

import argparse
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from torchq.analysis.detections import Detections
from torchq.analysis.outputs import find_metric
from torchq.cli.loading import (
    Images,
    explained,
    is_network_file,
    load_batches,
    load_model,
    load_object,
)
from torchq.errors import ConfigError
from torchq.graph import (
    call_arguments,
    call_model,
    map_tensors,
    move_to,
    tensors_in,
)
from torchq.swap import Plan
from torchq.utils import wrap

_SIZE = 224
_NAMED_RANGES: dict[str, Callable[..., dict[str, Any]]] = {
    "cache": torchq.onnx.apply_calibration_cache,
    "encodings": torchq.onnx.apply_encodings,
}
_EXPECTED = {
    "model": "--model is missing; expected torchvision:NAME, package.module:factory or a file",
    "data": "--data is missing; expected a folder of images or package.module:loader",
}


@dataclass
class Prepared:
    """What a command works on."""

    model: nn.Module  # quantized and calibrated
    example: Any  # the arguments of one call, with one row or as many as the file fixes
    fixed_batch: bool  # the file of the model fixes how many images it takes
    calibration: list[object]  # the batches that ranges come from
    held_out: list[object]  # batches after these, or the same where there are no more

    @property
    def is_held_out(self) -> bool:
        """True if the model was not calibrated on the batches to compare on."""
        return self.held_out is not self.calibration


def quiet(text: object) -> None:
    """Print nothing: the result alone belongs on standard output."""


def require(args: argparse.Namespace, *names: str) -> None:
    """Raise one error that names everything that is missing."""
    missing = [_EXPECTED[name] for name in names if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"{'; '.join(missing)}. See torchq {args.command} --help")


def read_model(args: argparse.Namespace) -> nn.Module:
    """Return the float model on its device."""
    try:
        torch.zeros(1, device=args.device).cpu()  # which a meta tensor cannot follow
    except Exception as error:  # of many kinds, by device
        raise ConfigError(f"--device {args.device}: {_first_line(error)}") from None
    return load_model(args.model, args.weights).to(args.device)


def named_config(recipe: str | None) -> torchq.QuantConfig | None:
    """Return a recipe by name, or the content of a configuration file; None for the target's."""
    if recipe is None:
        return None
    if recipe.endswith(".json"):
        return torchq.QuantConfig.from_json(
            Path(recipe).read_text("utf-8", errors="replace")
        )
    return torchq.recipes.by_name(recipe)


def selection(args: argparse.Namespace) -> dict[str, Any]:
    """Return the patterns of a command, as arguments of :func:`torchq.plan`."""
    return {"include": args.include, "exclude": args.exclude}


def read_metric(args: argparse.Namespace) -> Any:
    """Return the metric that was asked for, or None; what it raises names the option."""
    if args.metric == Detections.name:
        return args.metric
    if args.metric is None:
        name = "--labels"
        metric = accuracy if args.labels else None
    else:
        name = f"--metric {args.metric}"
        metric = load_object(args.metric, "--metric")
        find_metric("--metric", metric)
    if metric is None:
        return None

    @functools.wraps(metric)
    def measured(*given: object) -> float:
        with explained(name):
            return float(metric(*given))

    return measured


def accuracy(output: Any, batch: Any) -> Tensor:
    """Return the share of images whose largest score is that of their label."""
    return (output.argmax(1).cpu() == batch[1].cpu()).float().mean()


def read_batches(
    model: nn.Module, args: argparse.Namespace, held_out: int = 0
) -> tuple[list[Any], list[Any]]:
    """Return the batches to calibrate on, and up to ``held_out`` that come after them.

    With named ranges there is one batch of random images, which only shows what reads a tensor.
    """
    if named_ranges(args):
        return [_random_images(model, args)], []
    size = args.image_size or (_SIZE, _SIZE)
    fixed = None
    if is_network_file(args.model) and Path(args.data).is_dir():
        size = _image_size(model, args)
        fixed = fixed_batch(model, args)
    # A multiple of the batch that a file fixes, so that no fewer images are read than else.
    count = args.batch_size if fixed is None else -(-args.batch_size // fixed) * fixed
    images = Images(count, size, args.mean, args.std, args.seed)
    labelled = getattr(args, "labels", False)
    source: Iterable[Any] = load_batches(args.data, images, labelled=labelled)
    with explained(f"--data {args.data}"):
        batches = list(islice(source, args.num_batches + held_out))
    # Of short data a quarter stays for the comparison.
    kept_back = min(held_out, max(1, len(batches) // 4)) if len(batches) > 1 else 0
    count = min(args.num_batches, len(batches) - kept_back)
    calibration = _pieces(batches[:count], fixed)
    held_back = _pieces(batches[count:], fixed)
    if not calibration:
        expected_count = (
            "at least one"
            if fixed is None
            else f"at least {fixed} images, as the file fixes"
        )
        raise ConfigError(f"--data: got no batch; expected {expected_count}")
    return calibration, held_back


def named_ranges(args: argparse.Namespace) -> tuple[str, str] | None:
    """Return the option and the file with the ranges of the tensors of an ONNX file, or None."""
    option_values = ((option, getattr(args, option, None)) for option in _NAMED_RANGES)
    return next(
        ((option, path) for option, path in option_values if path is not None), None
    )


def _random_images(model: nn.Module, args: argparse.Namespace) -> Tensor:
    """Return random images of the size that an ONNX file takes, which show what reads a tensor."""
    other_sources = [
        f"--{name} too" for name in ("data", "calib") if getattr(args, name) is not None
    ]
    if other_sources or not args.model.endswith(".onnx"):
        raise ConfigError(
            f"{_source(args)}: got {', '.join(other_sources) or f'the model {args.model}'}; "
            "expected MODEL.onnx and no --data or --calib, since the ranges are those of that file"
        )
    shapes: Any = model.input_shapes
    has_sizes = len(shapes) == 1 and shapes[0] and all(shapes[0][1:])
    size = shapes[0][1:] if has_sizes else (3, *_image_size(model, args))
    generator = torch.Generator().manual_seed(args.seed)
    return torch.randn(fixed_batch(model, args) or 1, *size, generator=generator)


def _source(args: argparse.Namespace) -> str:
    """Return where the inputs of a command come from, as the user wrote it."""
    option, path = named_ranges(args) or ("data", args.data)
    return f"--{option} {path}"


def _pieces(batches: list[Any], size: int | None) -> list[object]:
    """Return batches of exactly ``size`` images, of images alone or with labels."""
    if size is None:
        return batches
    whole_batches: list[object] = []
    for batch in batches:
        if isinstance(batch, Tensor):
            whole_batches += [
                images for images in batch.split(size) if len(images) == size
            ]
        else:
            pairs = zip(*(tensor.split(size) for tensor in batch), strict=True)
            whole_batches += [pair for pair in pairs if len(pair[0]) == size]
    return whole_batches


def fixed_batch(model: nn.Module, args: argparse.Namespace) -> int | None:
    """Return the batch size that an ONNX file fixes; files of others state one as an example."""
    if not args.model.endswith(".onnx"):
        return None
    shapes: Any = model.input_shapes
    return shapes[0][0] or None if shapes and shapes[0] else None


def _image_size(model: nn.Module, args: argparse.Namespace) -> tuple[int, int]:
    """Return height and width of the images that the network of a file takes."""
    shapes: Any = model.input_shapes
    stated = shapes[0] or [None, 3, None, None]
    if len(shapes) != 1 or len(stated) != 4 or stated[1] not in (3, None):
        raise ConfigError(
            f"{_source(args)}: {args.model} takes inputs of shapes {shapes}; a folder gives "
            "images (N, 3, height, width). Pass package.module:loader, or call "
            "torchq.onnx.apply_calibration_cache or apply_encodings from Python"
        )
    image_size = args.image_size or (_SIZE, _SIZE)
    height, width = (
        fixed or side for fixed, side in zip(stated[2:], image_size, strict=True)
    )
    if args.image_size not in (None, (height, width)):
        raise ConfigError(
            f"--image-size {image_size[0]}x{image_size[1]}: {args.model} fixes {height}x{width}; "
            "leave the option out"
        )
    return height, width


def example_of(model: nn.Module, batch: object, rows: int | None = None) -> Any:
    """Return the arguments of one call that a batch holds, without its labels.

    Args:
        model: whose forward tells arguments from labels.
        batch: a tensor, a tuple that may end with labels, or a mapping of keyword arguments.
        rows: how many rows to keep of each tensor that has as many as the first; None for all.
    """
    args, kwargs = call_arguments(model, batch)
    example = kwargs or args
    first = next(tensors_in(example), None)
    if first is None:
        raise ConfigError(
            f"--data: got batches of {type(batch).__name__}; expected a tensor, (tensor, ...) or "
            "a mapping of keyword arguments"
        )
    if rows is None or not first.dim():
        return example
    sizes = first.shape[:1]
    return map_tensors(example, lambda x: x[:rows] if x.shape[:1] == sizes else x)


def prepare(
    args: argparse.Namespace,
    *,
    say: Callable[[object], None],
    held_out: int,
    check: Callable[[], object] = lambda: None,
) -> Prepared:
    """Prepare a model; call ``check`` once model and recipe are read, before any other work."""
    if args.model is None:
        require(args, "model", "data")
    model = read_model(args)
    config = named_config(args.recipe)
    ranges = named_ranges(args)
    if ranges is None:
        require(args, "data")
    check()
    calibration, held_back = read_batches(model, args, held_out)
    fixed = fixed_batch(model, args)
    example = example_of(model, calibration[0], fixed or 1)
    example = move_to(example, torch.device(args.device))
    with torch.no_grad(), _wrong_size(example_of(model, calibration[0]), args):
        call_model(model, example)
    if args.fuse:
        fused = torchq.fuse_(model, example).fused
        say(f"fused {len(fused)} BatchNorms and branches")
    # A target wants one range for all quantizers of one tensor, which the example call finds.
    one = None if args.target is None else example
    plan = torchq.quantize_(
        model, config, target=args.target, example=one, **selection(args)
    )
    say(plan.table() if getattr(args, "rows", False) else in_short(plan))
    if getattr(args, "load", None):
        torchq.load(model, args.load)
        return Prepared(
            model, example, fixed is not None, calibration, held_back or calibration
        )
    if getattr(args, "export", None):
        torchq.onnx.preflight.check_formats(model, args.opset)
    if ranges is not None:
        ranges_report = _NAMED_RANGES[ranges[0]](model, ranges[1], example)
        say(f"took {len(ranges_report)} ranges from {ranges[1]}")
        return Prepared(model, example, fixed is not None, calibration, calibration)
    started = time.perf_counter()
    torchq.calibrate(model, calibration, method=args.calib, on_unseen=args.on_unseen)
    batches = "1 batch" if len(calibration) == 1 else f"{len(calibration)} batches"
    say(f"calibrated on {batches} in {time.perf_counter() - started:.1f} s")
    return Prepared(
        model, example, fixed is not None, calibration, held_back or calibration
    )


#: How many reasons for float are shown.
_REASONS = 6


def in_short(plan: Plan) -> str:
    """Return the verdict of a plan, and what stays float with the reasons."""
    by_reason: dict[str, Counter[str]] = {}
    for decision in plan.skipped:
        kinds = by_reason.setdefault(decision.reason, Counter())
        kinds[decision.class_name] += 1
    lines = [plan.verdict()]
    for reason, kinds in list(by_reason.items())[:_REASONS]:
        counts = ", ".join(f"{count} {name}" for name, count in kinds.most_common())
        lines.append(f"  float: {counts}: {reason}")
    if len(by_reason) > _REASONS:
        lines.append(f"  and {len(by_reason) - _REASONS} reasons more")
    if by_reason:
        lines.append("  --rows prints what is decided about each module")
    return "\n".join(wrap(line, indent="    ") for line in lines)


@contextmanager
def _wrong_size(batch: object, args: argparse.Namespace) -> Iterator[None]:
    """Explain why the model fails on the first batch, before all other work."""
    try:
        yield
    except Exception as error:  # whatever the model's code raises
        folder = args.data is None or Path(args.data).is_dir()
        advice = "; pass another --image-size" if folder else ""
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(batch))
        raise ConfigError(
            f"{_source(args)}: the model fails on a batch of shape {shapes} "
            f"({type(error).__name__}: {_first_line(error)}){advice}"
        ) from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
