"""Arguments and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torchq
from torchq.calib import methods
from torchq.cli.demo import run_demo
from torchq.cli.quantize import run_quantize
from torchq.errors import TorchqError

__all__ = ["main", "build_parser"]

_EXAMPLES = """examples:
  torchq demo --out torchq-demo
  torchq quantize --model torchvision:resnet18 --weights resnet18.pt --data photos/ --calib entropy --export resnet18.onnx
  torchq quantize --model mypackage.models:build --data mypackage.data:loader --exclude 'head.*' --save model.pt
  torchq quantize --model mypackage.models:build --recipe w4a4 --dry-run"""


def build_parser() -> argparse.ArgumentParser:
    """The parser, with all its help."""
    parser = argparse.ArgumentParser(
        prog="torchq",
        description="Quantize PyTorch models by swapping modules.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torchq {torchq.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train, quantize, export and verify a small network on real images, in about a minute",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("torchq-demo"),
        help="folder for the models and the table (default: %(default)s)",
    )
    demo.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the split, the initial weights and the order of batches (default: %(default)s)",
    )
    demo.add_argument(
        "--epochs",
        type=int,
        default=12,
        help="of FP32 training and of QAT, each (default: %(default)s)",
    )
    _add_quantize(
        commands.add_parser("quantize", help="quantize, calibrate and export your own model")
    )
    return parser


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("what to quantize")
    source.add_argument(
        "--model", required=True, help="torchvision:NAME, or package.module:factory (no arguments)"
    )
    source.add_argument("--weights", metavar="FILE", help="state dict to load first")
    source.add_argument("--device", default="cpu", help="where to calibrate (default: %(default)s)")
    data = parser.add_argument_group("calibration data")
    data.add_argument(
        "--data",
        metavar="SOURCE",
        help="a folder of images, or package.module:loader (an iterable of batches)",
    )
    data.add_argument(
        "--num-batches", type=int, default=16, help="how many batches (default: %(default)s)"
    )
    data.add_argument(
        "--batch-size", type=int, default=16, help="for a folder (default: %(default)s)"
    )
    data.add_argument(
        "--image-size", type=int, default=224, help="for a folder (default: %(default)s)"
    )
    data.add_argument(
        "--mean",
        type=float,
        nargs=3,
        default=(0.485, 0.456, 0.406),
        help="for a folder (default: ImageNet's)",
    )
    data.add_argument(
        "--std",
        type=float,
        nargs=3,
        default=(0.229, 0.224, 0.225),
        help="for a folder (default: ImageNet's)",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--recipe",
        default="int8",
        help=f"{', '.join(torchq.recipes.RECIPES)}, or a config file .json (default: %(default)s)",
    )
    how.add_argument(
        "--calib", choices=methods(), help="range estimation of activations (default: the recipe's)"
    )
    how.add_argument(
        "--include",
        action="append",
        metavar="PATTERN",
        help="only modules that match: a glob, re:REGEX or type:NAME; repeatable",
    )
    how.add_argument(
        "--exclude", action="append", metavar="PATTERN", help="no module that matches; repeatable"
    )
    how.add_argument(
        "--on-unseen",
        choices=("error", "disable", "dynamic"),
        default="error",
        help="quantizers that no batch reached (default: %(default)s)",
    )
    how.add_argument(
        "--no-fuse",
        dest="fuse",
        action="store_false",
        help="do not fold BatchNorm and branches first",
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--dry-run", action="store_true", help="print what would be quantized and why, and stop"
    )
    out.add_argument(
        "--export",
        metavar="FILE.onnx",
        help="write ONNX with QuantizeLinear / DequantizeLinear, and verify it in onnxruntime",
    )
    out.add_argument(
        "--target",
        choices=torchq.targets(),
        help="the runtime to place quantizers for and to shape the ONNX file for",
    )
    out.add_argument(
        "--opset", type=int, help="of the ONNX file (default: 20, or 21 where the types need it)"
    )
    out.add_argument(
        "--verify",
        type=int,
        default=2,
        metavar="N",
        help="batches to compare onnxruntime with PyTorch on (default: %(default)s)",
    )
    out.add_argument("--save", metavar="FILE.pt", help="write the quantized model for torchq.load")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 2 with one line on standard error where the user can act on it."""
    args = build_parser().parse_args(argv)
    try:
        if args.command == "demo":
            run_demo(args.out, seed=args.seed, epochs=args.epochs)
        else:
            run_quantize(args)
    except TorchqError as error:
        print(f"torchq {args.command}: error: {error}", file=sys.stderr)
        return 2
    return 0
