"""Arguments and exit codes."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

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
    whole,
)
from torchq.cli.quantize import run_quantize
from torchq.errors import TorchqError

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

_EXAMPLES = """examples:
  torchq demo --out torchq-demo
  torchq quantize --model torchvision:resnet18 --weights resnet18.pt --data photos/ \\
      --calib entropy --target onnxruntime --export resnet18.onnx
  torchq quantize --model mypackage.models:build --recipe w4a4 --dry-run
  torchq convert resnet-symbol.json --to resnet.pt2

exit codes: 0 done; 1 torchq doctor found an error; 2 wrong arguments, or a problem
that the message says how to mend; 130 interrupted. See also torchq COMMAND --help."""


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors suggest close names.

    Attributes:
        children: the parsers of its commands.
    """

    children: Mapping[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and what may be meant, and exit with code 2."""
        known = set(_OPTION.findall(self.format_help())) | set(self.children)
        for child in self.children.values():
            known |= set(_OPTION.findall(child.format_help()))
        wrong = re.findall(r"invalid choice: '([^']+)'", message)
        wrong += re.findall(r"unrecognized arguments: (\S+)", message)
        choices = re.findall(r"choose from (.*)\)", message)
        named = {name.strip(" '") for text in choices for name in text.split(",")}
        close = [c for w in wrong for c in difflib.get_close_matches(w, sorted(known | named), n=2)]
        suggestion = f". Did you mean {' or '.join(close)}?" if close else ""
        self.exit(2, f"{self.prog}: error: {message}{suggestion}\nSee {self.prog} --help\n")


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
            help="train, quantize, export and verify a small network",
        )
    )
    add_convert(commands)
    _add_quantize(commands)
    parsers = {}
    for name, (text, example) in COMMANDS.items():
        parsers[name] = _command(commands, name, text, example)
    add_analysis(parsers)
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
        return run_quantize(args) if args.command == "quantize" else run_analysis(args)
    return 0
