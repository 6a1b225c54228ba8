"""The arguments of all commands, as rows of tables; their types say what was expected."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torchq
from torchq.calib import methods
from torchq.runtime import reference_runtime

#: More than any count of batches, images or pixels; less than what C libraries refuse.
_MOST = 2**31 - 1
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

#: What runs the files that are written.
_READER = reference_runtime().name
_EXAMPLES = f"""examples:
  torchq demo --out torchq-demo
  torchq quantize --model torchvision:resnet18 --weights resnet18.pt --data photos/ \\
      --calib entropy --target {_READER} --export resnet18.onnx
  torchq quantize --model mypackage.models:build --recipe w4a4 --dry-run
  torchq convert resnet-symbol.json --to resnet.pt2

exit codes: 0 done; 1 torchq doctor found an error; 2 wrong arguments, or a problem
that the message says how to mend; 130 interrupted. See also torchq COMMAND --help."""


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors suggest close names, also of the commands ``children``."""

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


def number(*, above: float = -math.inf) -> Callable[[str], float]:
    """Return a type for finite numbers that are larger than ``above``."""
    bound = f" > {above:g}" if math.isfinite(above) else ""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > above):
            raise argparse.ArgumentTypeError(f"got {text!r}; expected a finite number{bound}")
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


def _row(*flags: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return flags, settings


def _counted(flag: str, least: int, default: int, text: str, **settings: Any) -> Any:
    help = f"{text} (default: %(default)s)"
    return _row(flag, type=whole(least), default=default, help=help, **settings)


#: Rows of a group; rows in an inner list exclude each other.
_SOURCE = [
    [
        _row("file", nargs="?", metavar="MODEL", help="a file of ONNX, MXNet or Caffe"),
        _row("--model", help="torchvision:NAME, or package.module:factory"),
    ],
    _row("--weights", metavar="FILE", help="state dict to load first, or weights of the file"),
    _row("--device", default="cpu", help="where to calibrate (default: %(default)s)"),
]
_DATA = [
    _row("--data", metavar="SOURCE", help="a folder of images, or package.module:loader"),
    _counted("--num-batches", 1, 16, "how many batches"),
    _counted("--batch-size", 1, 16, "for a folder: images in a batch"),
    _counted("--seed", 0, 0, "for a folder: of the order, even over its sub-folders"),
    _row(
        "--image-size",
        type=image_size,
        metavar="SIZE",
        help="for a folder: 224, or HEIGHTxWIDTH (default: that of the file, or 224)",
    ),
    _row(
        "--mean",
        type=number(),
        nargs=3,
        default=(0.485, 0.456, 0.406),
        help="for a folder (default: ImageNet's)",
    ),
    _row(
        "--std",
        type=number(above=0),
        nargs=3,
        default=(0.229, 0.224, 0.225),
        help="for a folder (default: ImageNet's)",
    ),
]
_METHOD = [
    _row(
        "--recipe",
        help=f"{', '.join(torchq.recipes.RECIPES)}, or a config file .json (default: the target's, "
        "or int8)",
    ),
    _row("--calib", choices=methods(), help="ranges of activations (default: the recipe's)"),
    _row(
        "--include",
        action="append",
        metavar="PATTERN",
        help="only modules that match: a glob, re:REGEX or type:NAME; repeatable",
    ),
    _row("--exclude", action="append", metavar="PATTERN", help="no module that matches; as above"),
    _row(
        "--on-unseen",
        choices=("error", "disable", "dynamic"),
        default="error",
        help="quantizers that no batch reached (default: %(default)s)",
    ),
    _row("--target", choices=torchq.targets(), help="the runtime to quantize and export for"),
    _row(
        "--no-fuse",
        dest="fuse",
        action="store_false",
        help="do not fold BatchNorm and branches first",
    ),
]
_COMPARISON = [
    [
        _row(
            "--metric",
            metavar="NAME",
            help="package.module:function of (output, batch) or of a model; larger is better",
        ),
        _row(
            "--labels",
            action="store_true",
            help="measure accuracy: the sub-folders of --data are the classes, by name",
        ),
    ]
]
_OUTPUT = [
    _row("--dry-run", action="store_true", help="print what would be quantized and why, and stop"),
    _row("--export", metavar="FILE.onnx", help=f"write ONNX with Q/DQ; verify it in {_READER}"),
    _row(
        "--opset",
        type=whole(10, 23),
        help="of the ONNX file (default: 20, or 21 where the types need it)",
    ),
    _counted("--verify", 1, 2, f"batches to compare {_READER} with PyTorch on", metavar="N"),
    _row("--save", metavar="FILE.pt", help="write the quantized model for torchq.load"),
]
_REPORT = [
    _counted("--compare", 0, 4, "batches after those of the calibration", metavar="N"),
    [
        _row(
            "--report",
            metavar="FILE.html",
            help="the report of torchq.report, with formats under a budget (default: a shorter "
            "one, beside the file of --export or --save, or torchq-report.html)",
        ),
        _row("--no-report", action="store_true", help="write no report"),
    ],
]
_JSON = _row("--json", action="store_true", help="print JSON and nothing else")
_LOAD = [_row("--load", metavar="FILE.pt", help="ranges that torchq.save wrote"), _JSON]
_ANALYSIS = {"what to quantize": _SOURCE, "data": _DATA, "how": _METHOD}

#: Command -> its help, an example, and its groups of arguments.
COMMANDS: dict[str, tuple[str, str, dict[str, list[Any]]]] = {
    "demo": (
        "train, quantize, export and verify a small network",
        "torchq demo --out torchq-demo",
        {
            "options": [
                _row(
                    "--out",
                    type=Path,
                    default=Path("torchq-demo"),
                    help="folder for the models and the table (default: %(default)s)",
                ),
                _counted("--seed", 0, 0, "of the split, the first weights, the order of batches"),
                _counted("--epochs", 1, 12, "of FP32 training and of QAT, each"),
            ]
        },
    ),
    "convert": (
        "turn ONNX, MXNet or Caffe files into torch.export's",
        "torchq convert resnet-symbol.json --to resnet.pt2",
        {
            "options": [
                _row("file", metavar="MODEL", help="NAME.onnx, NAME-symbol.json, NAME.prototxt"),
                _row("--weights", metavar="FILE", help="weights that lie or are called otherwise"),
                _row("--to", required=True, metavar="FILE.pt2", help="the file to write"),
                _row(
                    "--shape",
                    action="append",
                    default=[],
                    metavar="1,3,224,224",
                    help="of an input whose sizes the file leaves open; once for each input",
                ),
            ]
        },
    ),
    "quantize": (
        "quantize, calibrate and export your own model",
        "torchq quantize --model torchvision:resnet18 --data photos/ --export resnet18.onnx "
        "--report report.html",
        {
            "what to quantize": _SOURCE,
            "calibration data": _DATA,
            "how": _METHOD,
            "output": [*_OUTPUT, _JSON],
            "comparison with the float model": [*_COMPARISON, *_REPORT],
        },
    ),
    "doctor": (
        "look for mistakes in a quantized model",
        "torchq doctor --model mypackage.models:build --data photos/",
        {**_ANALYSIS, "state and output": _LOAD},
    ),
    "report": (
        "write everything about a quantized model on one page",
        "torchq report --model torchvision:resnet18 --data photos/ --labels --out report.html",
        {
            **_ANALYSIS,
            "comparison": _COMPARISON,
            "state and output": [
                *_LOAD,
                _row("--out", metavar="FILE", help=".html, .json or .txt (default: print text)"),
            ],
        },
    ),
    "inspect": (
        "say what is quantized in an ONNX file or a model",
        "torchq inspect model.onnx",
        {**_ANALYSIS, "state and output": _LOAD},
    ),
    "plan": (
        "say what would be quantized, or choose formats by budget",
        "torchq plan --model mypackage.models:build --data photos/ --budget mean_bits=5 "
        "--formats 4 6 8 --out config.json",
        {
            **_ANALYSIS,
            "state and output": [
                *_LOAD,
                _row(
                    "--budget",
                    action="append",
                    default=[],
                    metavar="KIND=NUMBER",
                    help="such as mean_bits=5",
                ),
                _row("--formats", nargs="+", default=["w8a8", "w4a8", "w4a4"], metavar="FORMAT"),
                _row("--out", metavar="FILE.json", help="write the config, for --recipe"),
            ],
        },
    ),
}


def build_parser() -> Parser:
    """Return the parser, with all its help."""
    formatted: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    description = "Quantize PyTorch models by swapping modules."
    parser = Parser(prog="torchq", description=description, epilog=_EXAMPLES, **formatted)
    parser.add_argument("--version", action="version", version=f"torchq {torchq.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (text, example, groups) in COMMANDS.items():
        child = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example:\n  {example}",
            **formatted,
        )
        for title, rows in groups.items():
            group = child.add_argument_group(title)
            for row in rows:
                place: Any = group.add_mutually_exclusive_group() if type(row) is list else group
                for flags, settings in row if type(row) is list else [row]:
                    place.add_argument(*flags, **settings)
    parser.children = dict(commands.choices)
    return parser
