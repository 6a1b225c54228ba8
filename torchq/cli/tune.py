"""``torchq tune``: find settings with which a model keeps a metric."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import torchq
from torchq.cli.loading import load_object
from torchq.cli.options import add_data, add_json, add_source
from torchq.cli.prepare import named_config, read_batches, read_model, require
from torchq.cli.quantize import check_folder
from torchq.errors import ConfigError

__all__ = ["add_tune_arguments", "run_tune"]


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add_source(parser.add_argument_group("what to quantize"))
    add_data(parser.add_argument_group("calibration data"))
    goal = parser.add_argument_group("goal")
    goal.add_argument(
        "--metric",
        metavar="FUNCTION",
        help="package.module:function, called with the model; returns a number, larger is better",
    )
    goal.add_argument("--max-drop", type=float, help="the largest loss of the metric")
    goal.add_argument("--recipe", default="int8", help="a recipe, or a config file .json")
    goal.add_argument("--time-limit", type=float, help="seconds after which no trial is started")
    output = parser.add_argument_group("output")
    output.add_argument("--save", metavar="FILE.pt", help="write the model for torchq.load")
    output.add_argument("--save-config", metavar="FILE.json", help="write the settings")
    add_json(parser)


def run_tune(args: argparse.Namespace) -> int:
    """Carry out the command, print the table of trials, and return the exit code."""
    require(args, "model", "data", "metric", "max_drop")
    check_folder("--save", args.save)
    check_folder("--save-config", args.save_config)
    model, recipe = read_model(args), named_config(args.recipe)
    metric = load_object(args.metric, "--metric")
    if not callable(metric):
        kind = type(metric).__name__
        raise ConfigError(f"--metric {args.metric}: got a {kind}; expected a function")
    batches = read_batches(args, args.num_batches)
    with torch.no_grad():
        torchq.fuse_(model, batches[0])
    result = torchq.tune(
        model,
        batches,
        metric,
        max_drop=args.max_drop,
        recipe=recipe,
        time_limit=args.time_limit,
    )
    print(json.dumps(json.loads(result.config.to_json()), indent=2) if args.json else result)
    if args.save_config:
        Path(args.save_config).write_text(result.config.to_json(), encoding="utf-8")
    if args.save:
        torchq.save(result.model, args.save)
    return 0
