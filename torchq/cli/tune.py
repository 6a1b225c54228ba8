"""``torchq tune``: find settings with which a model keeps a metric."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable

import torch
from torch import nn

import torchq
from torchq.cli.loading import explained, load_object
from torchq.cli.options import add_data, add_json, add_source
from torchq.cli.prepare import named_config, read_batches, read_model, require
from torchq.cli.values import number
from torchq.errors import ConfigError
from torchq.utils import replacing

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
    goal.add_argument("--max-drop", type=number(least=0), help="the largest loss of the metric")
    goal.add_argument("--recipe", default="int8", help="a recipe, or a config file .json")
    goal.add_argument(
        "--time-limit", type=number(above=0), help="seconds after which no trial is started"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--save", metavar="FILE.pt", help="write the model for torchq.load")
    output.add_argument("--save-config", metavar="FILE.json", help="write the settings")
    add_json(parser)


def run_tune(args: argparse.Namespace) -> int:
    """Carry out the command, print the table of trials, and return the exit code."""
    require(args, "model", "data", "metric", "max_drop")
    model, recipe = read_model(args), named_config(args.recipe)
    metric = _read_metric(args.metric)
    batches, _ = read_batches(model, args)
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
        with replacing(args.save_config) as (path,):
            path.write_text(result.config.to_json(), encoding="utf-8")
    if args.save:
        torchq.save(result.model, args.save)
    return 0


def _read_metric(name: str) -> Callable[[nn.Module], float]:
    """Return the metric, so that what it raises names the option.

    Raises:
        ConfigError: It is no function of a model.
    """
    metric = load_object(name, "--metric")
    try:
        inspect.signature(metric).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--metric {name}: {error}; expected a function that takes the model alone"
        ) from None

    def measured(model: nn.Module) -> float:
        with explained(f"--metric {name}"):
            return float(metric(model))

    return measured
