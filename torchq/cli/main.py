"""Arguments and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torchq
from torchq.calib import methods
from torchq.cli.convert import add_convert, run_convert
from torchq.cli.demo import run_demo
from torchq.cli.quantize import run_quantize
from torchq.cli.tune import add_tune_arguments, run_tune
from torchq.errors import TorchqError

__all__ = ["main", "build_parser"]

_EXAMPLES = """examples:
  torchq demo --out torchq-demo
  torchq quantize --model torchvision:resnet18 --weights resnet18.pt --data photos/ \\
      --calib entropy --target onnxruntime --export resnet18.onnx
  torchq quantize --model mypackage.models:build --data mypackage.data:loader \\
      --exclude 'head.*' --save model.pt
  torchq quantize --model mypackage.models:build --recipe w4a4 --dry-run
  torchq quantize float.onnx --data photos/ --export int8.onnx
  torchq convert resnet-symbol.json --to resnet.pt2"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, with all its help."""
    parser = argparse.ArgumentParser(
        prog="torchq",
        description="Quantize PyTorch models by swapping modules.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torchq {torchq.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(
        commands.add_parser(
            "demo",
            help="train, quantize, export and verify a small network on real images, "
            "in about a minute",
        )
    )
    add_convert(commands)
    add_tune_arguments(
        commands.add_parser("tune", help="find settings with which your own model keeps a metric")
    )
    quantize = commands.add_parser("quantize", help="quantize, calibrate and export your own model")
    _add_source(quantize.add_argument_group("what to quantize"))
    _add_data(quantize.add_argument_group("calibration data"))
    _add_method(quantize.add_argument_group("how"))
    _add_output(quantize.add_argument_group("output"))
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("torchq-demo"),
        help="folder for the models and the table (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the split, the initial weights and the order of batches (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=12,
        help="of FP32 training and of QAT, each (default: %(default)s)",
    )


def _add_source(group: Any) -> None:
    either = group.add_mutually_exclusive_group(required=True)
    either.add_argument("file", nargs="?", metavar="MODEL", help="a file of ONNX, MXNet or Caffe")
    either.add_argument("--model", help="torchvision:NAME, or package.module:factory")
    group.add_argument(
        "--weights", metavar="FILE", help="state dict to load first, or the weights beside the file"
    )
    group.add_argument("--device", default="cpu", help="where to calibrate (default: %(default)s)")


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data",
        metavar="SOURCE",
        help="a folder of images, or package.module:loader (an iterable of batches)",
    )
    for name, number, text in (
        ("--num-batches", 16, "how many batches"),
        ("--batch-size", 16, "for a folder: images in a batch"),
        ("--image-size", 224, "for a folder: height and width"),
        ("--seed", 0, "for a folder: of the order, which takes evenly from its sub-folders"),
    ):
        group.add_argument(name, type=int, default=number, help=f"{text} (default: %(default)s)")
    for name, numbers in (("--mean", (0.485, 0.456, 0.406)), ("--std", (0.229, 0.224, 0.225))):
        text = "for a folder (default: ImageNet's)"
        group.add_argument(name, type=float, nargs=3, default=numbers, help=text)


def _add_method(group: Any) -> None:
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
        "--no-fuse",
        dest="fuse",
        action="store_false",
        help="do not fold BatchNorm and branches first",
    )


def _add_output(group: Any) -> None:
    group.add_argument(
        "--dry-run", action="store_true", help="print what would be quantized and why, and stop"
    )
    group.add_argument(
        "--export",
        metavar="FILE.onnx",
        help="write ONNX with QuantizeLinear / DequantizeLinear, and verify it in onnxruntime",
    )
    group.add_argument(
        "--target",
        choices=torchq.targets(),
        help="the runtime to place quantizers for and to shape the ONNX file for",
    )
    group.add_argument(
        "--opset", type=int, help="of the ONNX file (default: 20, or 21 where the types need it)"
    )
    group.add_argument(
        "--verify",
        type=int,
        default=2,
        metavar="N",
        help="batches to compare onnxruntime with PyTorch on (default: %(default)s)",
    )
    group.add_argument(
        "--save", metavar="FILE.pt", help="write the quantized model for torchq.load"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or print the help if there is none.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        0 on success; 2 with one line on standard error if the user can mend the problem.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        if args.command == "demo":
            run_demo(args.out, seed=args.seed, epochs=args.epochs)
        elif args.command == "convert":
            run_convert(args)
        elif args.command == "tune":
            run_tune(args)
        else:
            args.model = args.model or args.file
            run_quantize(args)
    except (TorchqError, OSError) as error:
        print(f"torchq {args.command}: error: {error}", file=sys.stderr)
        return 2
    return 0
