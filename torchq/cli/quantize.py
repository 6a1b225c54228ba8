"""``torchq quantize``: calibrate and export a user's own model."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from torchq.cli.loading import Images, load_batches, load_model, load_text
from torchq.errors import ConfigError
from torchq.onnx.preflight import check_formats

__all__ = ["run_quantize"]


def run_quantize(args: argparse.Namespace) -> None:
    """Carry out the command step by step, and announce each step on the terminal."""
    model = _on_device(load_model(args.model, args.weights), args.device)
    config = _config(args.recipe)
    if args.dry_run:
        print(torchq.plan(model, config, target=args.target, **_selection(args)))
        return
    if args.data is None:
        raise ConfigError(
            "--data is missing; expected a folder of images or package.module:loader (or --dry-run)"
        )
    _check_outputs(args)
    batches = list(_head(_batches(args), args.num_batches))
    example = _example(batches[0]).to(args.device)
    _check_example(model, example, args)
    if args.fuse:
        fused = torchq.fuse_(model, (example[:1],)).fused
        print(f"fused {len(fused)} BatchNorms and branches")
    # A target wants one range for all quantizers of one tensor, which the example call finds.
    one = None if args.target is None else (example[:1],)
    print(torchq.quantize_(model, config, target=args.target, example=one, **_selection(args)))
    if args.export:
        check_formats(model)
    started = time.perf_counter()
    torchq.calibrate(model, batches, method=args.calib, on_unseen=args.on_unseen)
    print(f"calibrated on {len(batches)} batches in {time.perf_counter() - started:.1f} s")
    _write(model, example, batches, args)


def _on_device(model: nn.Module, device: str) -> nn.Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"--device {device}: {_first_line(error)}") from None


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


def _selection(args: argparse.Namespace) -> dict[str, Any]:
    return {"include": args.include, "exclude": args.exclude}


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise an error where a file could not be written later, before any work is done."""
    for option, path in (("--export", args.export), ("--save", args.save)):
        if path is None:
            continue
        folder = Path(path).absolute().parent
        if Path(path).is_dir():
            raise ConfigError(f"{option} {path}: is a folder; expected a file")
        if not folder.is_dir():
            raise ConfigError(f"{option} {path}: the folder {folder} does not exist")
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{option} {path}: the folder {folder} is not writable")


def _config(recipe: str) -> torchq.QuantConfig:
    """Return a recipe by name, or the content of a configuration file."""
    if recipe.endswith(".json"):
        try:
            return torchq.QuantConfig.from_json(Path(recipe).read_text())
        except FileNotFoundError:
            raise ConfigError(f"--recipe {recipe}: no such file") from None
    return torchq.recipes.by_name(recipe)


def _batches(args: argparse.Namespace) -> Iterable[Any]:
    images = Images(args.batch_size, args.image_size, args.mean, args.std, args.seed)
    return load_batches(args.data, images)


def _head(batches: Iterable[Any], count: int) -> Iterable[Any]:
    found = list(islice(batches, count))
    if not found:
        raise ConfigError("--data: got no batch; expected at least one")
    return found


def _example(batch: Any) -> Tensor:
    """Return the input tensor of a batch; the export traces with it."""
    first = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(first, Tensor):
        raise ConfigError(
            f"--data: got batches of {type(batch).__name__}; expected a tensor or (tensor, ...)"
        )
    return first


def _write(model: nn.Module, example: Tensor, batches: list[Any], args: argparse.Namespace) -> None:
    if args.save:
        torchq.save(model, args.save)
        how = load_text(args.model, args.save, args.weights)
        print(f"wrote {args.save}: load it with\n  {how}")
    if args.export:
        torchq.export_onnx(model, (example[:1],), args.export, opset=args.opset, target=args.target)
        print(f"wrote {args.export} ({Path(args.export).stat().st_size / 2**20:.2f} MiB)")
        print(
            torchq.verify_onnx(
                model, args.export, [_example(batch) for batch in batches[: args.verify]]
            )
        )
    if not (args.save or args.export):
        print(torchq.summary(model))
        print("nothing written; use --export FILE.onnx or --save FILE.pt")
