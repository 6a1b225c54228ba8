"""Arguments and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torchq
from torchq.cli.analyse import COMMANDS, add_analysis, run_analysis
from torchq.cli.convert import add_convert, run_convert
from torchq.cli.demo import NETWORKS, run_demo
from torchq.cli.files import check_paths
from torchq.cli.options import (
    add_comparison,
    add_data,
    add_json,
    add_method,
    add_output,
    add_report,
    add_source,
)
from torchq.cli.parser import SHELLS, Parser, completion_script
from torchq.cli.quantize import run_quantize
from torchq.cli.tune import add_tune_arguments, run_tune
from torchq.cli.values import whole
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
  torchq convert resnet-symbol.json --to resnet.pt2
  torchq report --model torchvision:resnet18 --data photos/ --out report.html
  torchq doctor --model mypackage.models:build --data photos/
  eval "$(torchq completion bash)"

exit codes:
  0  done
  1  torchq doctor found an error
  2  wrong arguments, or a problem that the message says how to mend
  130  interrupted"""


def build_parser() -> Parser:
    """Return the parser, with all its help."""
    parser = Parser(
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
        _command(
            commands,
            "tune",
            "find settings with which your own model keeps a metric",
            "torchq tune --model mypackage.models:build --data photos/ "
            "--metric mypackage.evaluate:accuracy --max-drop 0.01 --save model.pt",
        )
    )
    _add_quantize(commands)
    parsers = {}
    for name, (text, example) in COMMANDS.items():
        parsers[name] = _command(commands, name, text, example)
    add_analysis(parsers)
    completion = commands.add_parser("completion", help="print a script for your shell")
    completion.add_argument("shell", choices=SHELLS)
    parser.children = dict(commands.choices)
    return parser


def _command(commands: Any, name: str, text: str, example: str) -> Parser:
    found: Parser = commands.add_parser(
        name,
        help=text,
        description=text.capitalize() + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return found


def _add_quantize(commands: Any) -> None:
    parser = _command(
        commands,
        "quantize",
        "quantize, calibrate and export your own model",
        "torchq quantize --model torchvision:resnet18 --data photos/ --export resnet18.onnx "
        "--report report.html",
    )
    add_source(parser.add_argument_group("what to quantize"))
    add_data(parser.add_argument_group("calibration data"))
    add_method(parser.add_argument_group("how"))
    add_output(parser.add_argument_group("output"))
    comparison = parser.add_argument_group("comparison with the float model")
    add_comparison(comparison)
    comparison.add_argument(
        "--compare",
        type=whole(0),
        default=4,
        metavar="N",
        help="batches after those of the calibration; 0 compares nothing (default: %(default)s)",
    )
    add_report(comparison)
    add_json(parser)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("torchq-demo"),
        help="folder for the models and the table (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        help="of the split, the initial weights and the order of batches (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=whole(1),
        help="of FP32 training and of QAT, each (default: 12 for repvgg, fewer for others)",
    )
    parser.add_argument(
        "--model",
        default="repvgg",
        choices=tuple(NETWORKS),
        help="what is trained on the digits: a small network, or a known architecture, which "
        "takes longer (default: %(default)s)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or print the help if there is none.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        0 on success; 1 if the doctor found an error; 2 with one line on standard error if the user
        can mend the problem; 130 if interrupted.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    if args.command == "completion":
        print(completion_script(args.shell, parser.children))
        return 0
    try:
        return _run(args)
    except (TorchqError, OSError) as error:
        print(f"torchq {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"torchq {args.command}: interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    check_paths(args)
    if args.command == "demo":
        run_demo(args.out, seed=args.seed, epochs=args.epochs, model=args.model)
    elif args.command == "convert":
        run_convert(args)
    else:
        args.model = args.model or args.file
        own = {"quantize": run_quantize, "tune": run_tune}
        return own.get(args.command, run_analysis)(args)
    return 0
