"""Arguments that several commands share, and their types: errors say what was expected."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

import torchq
from torchq.calib import methods

#: More than any count of batches, images or pixels; less than what C libraries refuse.
_MOST = 2**31 - 1


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """Return a type for whole numbers from ``least`` to ``most``."""
    expected = f"{least} or more" if most == _MOST else f"{least} to {most}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number, {expected}")
        return value

    return convert


def number(*, above: float = -math.inf, least: float = -math.inf) -> Callable[[str], float]:
    """Return a type for finite numbers that are larger than ``above`` and at least ``least``."""
    bounds = [f" > {above:g}"] * math.isfinite(above) + [f" >= {least:g}"] * math.isfinite(least)

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > above and value >= least):
            raise argparse.ArgumentTypeError(
                f"got {text!r}; expected a finite number{''.join(bounds)}"
            )
        return value

    return convert


def image_size(text: str) -> tuple[int, int]:
    """Return height and width, from ``224`` or ``HEIGHTxWIDTH``."""
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected pixels such as 224, or HEIGHTxWIDTH such as 480x640"
        )
    height, _, width = text.partition("x")
    return int(height), int(width or height)


def add_source(group: Any) -> None:
    """Add the arguments that name a model."""
    either = group.add_mutually_exclusive_group()
    either.add_argument("file", nargs="?", metavar="MODEL", help="a file of ONNX, MXNet or Caffe")
    either.add_argument("--model", help="torchvision:NAME, or package.module:factory")
    group.add_argument(
        "--weights", metavar="FILE", help="state dict to load first, or the weights beside the file"
    )
    group.add_argument("--device", default="cpu", help="where to calibrate (default: %(default)s)")


def add_data(group: Any) -> None:
    """Add the arguments that name and prepare data."""
    group.add_argument(
        "--data",
        metavar="SOURCE",
        help="a folder of images, or package.module:loader (an iterable of batches)",
    )
    for name, least, default, text in (
        ("--num-batches", 1, 16, "how many batches"),
        ("--batch-size", 1, 16, "for a folder: images in a batch"),
        ("--seed", 0, 0, "for a folder: of the order, which takes evenly from its sub-folders"),
    ):
        text = f"{text} (default: %(default)s)"
        group.add_argument(name, type=whole(least), default=default, help=text)
    group.add_argument(
        "--image-size",
        type=image_size,
        metavar="SIZE",
        help="for a folder: 224, or HEIGHTxWIDTH (default: that of the file, or 224)",
    )
    text = "for a folder (default: ImageNet's)"
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    group.add_argument("--mean", type=number(), nargs=3, default=mean, help=text)
    group.add_argument("--std", type=number(above=0), nargs=3, default=std, help=text)


def add_method(group: Any) -> None:
    """Add the arguments that say how to quantize."""
    group.add_argument(
        "--recipe",
        default="int8",
        help=f"{', '.join(torchq.recipes.RECIPES)}, or a config file .json (default: %(default)s)",
    )
    group.add_argument(
        "--calib", choices=methods(), help="range estimation of activations (default: the recipe's)"
    )
    group.add_argument(
        "--include",
        action="append",
        metavar="PATTERN",
        help="only modules that match: a glob, re:REGEX or type:NAME; repeatable",
    )
    group.add_argument(
        "--exclude", action="append", metavar="PATTERN", help="no module that matches; repeatable"
    )
    group.add_argument(
        "--on-unseen",
        choices=("error", "disable", "dynamic"),
        default="error",
        help="quantizers that no batch reached (default: %(default)s)",
    )
    group.add_argument(
        "--target",
        choices=torchq.targets(),
        help="the runtime to place quantizers for and to shape the ONNX file for",
    )
    group.add_argument(
        "--no-fuse",
        dest="fuse",
        action="store_false",
        help="do not fold BatchNorm and branches first",
    )


def add_output(group: Any) -> None:
    """Add the files that ``torchq quantize`` writes."""
    group.add_argument(
        "--dry-run", action="store_true", help="print what would be quantized and why, and stop"
    )
    group.add_argument(
        "--export",
        metavar="FILE.onnx",
        help="write ONNX with QuantizeLinear / DequantizeLinear, and verify it in onnxruntime",
    )
    group.add_argument(
        "--opset",
        type=whole(10, 23),
        help="of the ONNX file (default: 20, or 21 where the types need it)",
    )
    group.add_argument(
        "--verify",
        type=whole(1),
        default=2,
        metavar="N",
        help="batches to compare onnxruntime with PyTorch on (default: %(default)s)",
    )
    group.add_argument(
        "--save", metavar="FILE.pt", help="write the quantized model for torchq.load"
    )


def add_report(group: Any) -> None:
    """Add the options about the report of ``torchq quantize``."""
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--report",
        metavar="FILE.html",
        help="the report of torchq.report, with formats under a budget (default: a shorter one, "
        "beside the file of --export or --save, or torchq-report.html)",
    )
    either.add_argument("--no-report", action="store_true", help="write no report")


def add_json(parser: Any) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def add_comparison(group: Any) -> None:
    """Add the arguments of a comparison with the float model."""
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--metric",
        metavar="NAME",
        help="package.module:function of (output, batch) or of a model; larger is better",
    )
    either.add_argument(
        "--labels",
        action="store_true",
        help="the sub-folders of --data are the classes, in the order of their names: measure "
        "accuracy",
    )
