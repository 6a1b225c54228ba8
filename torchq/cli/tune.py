"""``torchq tune``: find settings with which a model keeps a metric."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import torchq
from torchq.cli.loading import Images, load_batches, load_model, load_object
from torchq.errors import ConfigError

__all__ = ["add_tune_arguments", "run_tune"]


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "--model", required=True, help="torchvision:NAME, or package.module:factory"
    )
    parser.add_argument("--weights", metavar="FILE", help="state dict to load first")
    parser.add_argument(
        "--data",
        required=True,
        metavar="SOURCE",
        help="to calibrate on: a folder of images, or package.module:loader",
    )
    parser.add_argument(
        "--metric",
        required=True,
        metavar="FUNCTION",
        help="package.module:function, called with the model; returns a number, larger is better",
    )
    parser.add_argument(
        "--max-drop", required=True, type=float, help="the largest loss of the metric"
    )
    parser.add_argument("--recipe", default="int8", help="a recipe, or a config file .json")
    parser.add_argument("--time-limit", type=float, help="seconds after which no trial is started")
    parser.add_argument("--num-batches", type=int, default=16, help="how many batches")
    parser.add_argument("--batch-size", type=int, default=16, help="for a folder")
    parser.add_argument("--image-size", type=int, default=224, help="for a folder")
    parser.add_argument("--checkpoint", metavar="FILE.json", help="go on from the trials in it")
    parser.add_argument("--save", metavar="FILE.pt", help="write the model for torchq.load")
    parser.add_argument("--save-config", metavar="FILE.json", help="write the settings")


def run_tune(args: argparse.Namespace) -> None:
    """Carry out the command; print the table of trials."""
    model = load_model(args.model, args.weights)
    images = Images(
        args.batch_size, args.image_size, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 0
    )
    batches = list(islice(load_batches(args.data, images), args.num_batches))
    metric: Any = load_object(args.metric, "--metric")
    if not callable(metric):
        kind = type(metric).__name__
        raise ConfigError(f"--metric {args.metric}: got a {kind}; expected a function")
    if batches:
        with torch.no_grad():
            torchq.fuse_(model, batches[0])
    result = torchq.tune(
        model,
        batches,
        metric,
        max_drop=args.max_drop,
        recipe=_recipe(args.recipe),
        time_limit=args.time_limit,
        checkpoint=args.checkpoint,
    )
    print(result)
    if args.save_config:
        Path(args.save_config).write_text(result.config.to_json(), encoding="utf-8")
    if args.save:
        torchq.save(result.model, args.save)


def _recipe(name: str) -> torchq.QuantConfig:
    """Return a recipe by name, or the content of a configuration file."""
    if not name.endswith(".json"):
        return torchq.recipes.by_name(name)
    try:
        return torchq.QuantConfig.from_json(Path(name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--recipe {name}: no such file") from None
