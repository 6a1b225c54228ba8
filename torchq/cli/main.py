"""The program: the arguments of all commands as rows of tables, errors and exit codes.

Nothing here loads torch, so that help and wrong arguments are answered at once. What carries out a
command is loaded when one runs: torchq/cli/run.py.
"""

import argparse
import difflib
import importlib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NoReturn

from torchq.cli.names import METHODS, READER, RECIPES, TARGETS
from torchq.errors import TorchqError
from torchq.version import __version__

#: More than any count of batches, images or pixels; less than what C libraries refuse.
_MOST = 2**31 - 1
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

_EXAMPLES = f"""examples:
  torchq demo --out torchq-demo
  torchq quantize --model torchvision:resnet18 --weights resnet18.pt --data photos/ \\
      --calib entropy --target {READER} --export resnet18.onnx
  torchq plan --model mypackage.models:build --recipe w4a4 --rows
  torchq convert resnet-symbol.json --to resnet.pt2

exit codes: 0 done; 1 torchq doctor found an error; 2 wrong arguments, or a problem
that the message says how to mend; 130 interrupted. See also torchq COMMAND --help."""


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors suggest close names, also of the commands ``children``.

    Attributes:
        children: the parsers of the commands.
        repeatable: options that take one value and may be given again.
        words: what is parsed, for errors to look at.
    """

    children: Mapping[str, "Parser"] = {}
    repeatable: frozenset[str] = frozenset()
    words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and what may be meant, and exit with code 2."""
        option_names = set(_OPTION.findall(self.format_help())) | set(self.children)
        for child in self.children.values():
            option_names |= set(_OPTION.findall(child.format_help()))
        wrong = re.findall(r"invalid choice: '([^']+)'", message)
        wrong += re.findall(r"unrecognized arguments: (\S+)", message)
        choices = re.findall(r"choose from (.*)\)", message)
        named = {
            name.strip(" '")
            for choice_text in choices
            for name in choice_text.split(",")
        }
        close = [
            c
            for w in wrong
            for c in difflib.get_close_matches(w, sorted(option_names | named), n=2)
        ]
        suggestion = f". Did you mean {' or '.join(close)}?" if close else ""
        suggestion = self._several_values(message) or suggestion
        self.exit(
            2, f"{self.prog}: error: {message}{suggestion}\nSee {self.prog} --help\n"
        )

    def _several_values(self, message: str) -> str:
        """Return what to write where words behind the value of an option are taken for others."""
        about_words = ("argument MODEL: not allowed", "unrecognized arguments")
        if not message.startswith(about_words):
            return ""
        repeatable = self.repeatable.union(
            *(child.repeatable for child in self.children.values())
        )
        for place, option in enumerate(self.words):
            values = list(takewhile(_is_value, self.words[place + 1 :]))
            if option in repeatable and len(values) > 1:
                again = " ".join(f"{option} {value}" for value in values)
                return f". {option} takes one value and may be given again: {again}"
        return ""


def _is_value(word: str) -> bool:
    return not word.startswith("-")


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """Return a type for whole numbers from ``least`` to ``most``."""
    expected = f"{least} or more" if most == _MOST else f"{least} to {most}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"got {text!r}; expected a whole number, {expected}"
            )
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
            raise argparse.ArgumentTypeError(
                f"got {text!r}; expected a finite number{bound}"
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


def _row(
    flag: str,
    help: str,
    metavar: str | tuple[str, ...] | None = None,
    **settings: object,
) -> object:
    """Return an argument; its help ends with the default if that is one number or word."""
    if (
        isinstance(settings.get("default"), (int, str, Path))
        and settings.get("action") is None
    ):
        help = f"{help} (default: %(default)s)"
    if metavar is not None:
        settings["metavar"] = metavar
    return flag, {"help": help, **settings}


def _flag(flag: str, help: str, action: str = "store_true", **settings: Any) -> object:
    return _row(flag, help, action=action, **settings)


def _many(flag: str, help: str, metavar: str, **settings: object) -> object:
    return _row(flag, help, metavar, action="append", **settings)


def _count(flag: str, help: str, least: int, default: int, **settings: Any) -> object:
    return _row(flag, help, "N", type=whole(least), default=default, **settings)


#: Rows of a group; rows in an inner list exclude each other.
_SOURCE = [
    [
        _row("file", "a file of ONNX, MXNet or Caffe", "MODEL", nargs="?"),
        _row("--model", "torchvision:NAME, or package.module:factory"),
    ],
    _row("--weights", "state dict to load first, or weights of the file", "FILE"),
    _row("--device", "where to calibrate", default="cpu"),
]
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SIZE = "for a folder: 224, or HEIGHTxWIDTH (default: that of the file, or 224)"
_IMAGENETS = "for a folder (default: ImageNet's)"
_COLOURS = ("R", "G", "B")
_DATA = [
    _row("--data", "a folder of images, or package.module:loader", "SOURCE"),
    _count("--num-batches", "how many batches", 1, 16),
    _count("--batch-size", "for a folder: images in a batch", 1, 16),
    _count("--seed", "for a folder: of the order, even over its sub-folders", 0, 0),
    _row("--image-size", _SIZE, "SIZE", type=image_size),
    _row("--mean", _IMAGENETS, _COLOURS, type=number(), nargs=3, default=_MEAN),
    _row("--std", _IMAGENETS, _COLOURS, type=number(above=0), nargs=3, default=_STD),
]
_RECIPES = f"{', '.join(RECIPES)}, or a config file .json"
_PATTERN = "only modules that match: a glob, re:REGEX or type:NAME; repeatable"
_UNSEEN = ("error", "disable", "dynamic")
_METHOD = [
    _row("--recipe", f"{_RECIPES} (default: the target's, or int8)"),
    _row("--calib", "ranges of activations (default: the recipe's)", choices=METHODS),
    _many("--include", _PATTERN, "PATTERN"),
    _many("--exclude", "no module that matches; as above", "PATTERN"),
    _row(
        "--on-unseen",
        "quantizers that no batch reached",
        choices=_UNSEEN,
        default="error",
    ),
    _row("--target", "the runtime to quantize and export for", choices=TARGETS),
    _flag(
        "--no-fuse",
        "do not fold BatchNorm and branches first",
        "store_false",
        dest="fuse",
    ),
]
_METRIC = "package.module:function of (output, batch) or of a model, or detections"
_LABELS = "measure accuracy: the sub-folders of --data are the classes, by name"
_COMPARISON = [[_row("--metric", _METRIC, "NAME"), _flag("--labels", _LABELS)]]
_OPSET = "of the ONNX file (default: 20, or 21 where the types need it)"
_VERIFY = f"""batches to compare {READER} with PyTorch on, and where it is given the emulator of
    the target too, layer by layer (default: 2)"""
_OUTPUT = [
    _row("--export", f"write ONNX with Q/DQ; verify it in {READER}", "FILE.onnx"),
    _row("--opset", _OPSET, type=whole(10, 23)),
    _row("--verify", _VERIFY, "N", type=whole(1), nargs="?", const=2),
    _row("--save", "write the quantized model for torchq.load", "FILE.pt"),
]
_PAGE = """the report of torchq.report, with formats under a budget (default: a shorter one, beside
    the file of --export or --save, or torchq-report.html)"""
_REPORT = [
    _count("--compare", "batches after those of the calibration", 0, 4),
    [_row("--report", _PAGE, "FILE.html"), _flag("--no-report", "write no report")],
]
_JSON = _flag("--json", "print JSON and nothing else")
_ROWS = _flag("--rows", "print a row for every module")
_LOAD = [_row("--load", "ranges that torchq.save wrote", "FILE.pt"), _JSON]
_ANALYSIS = {"what to quantize": _SOURCE, "data": _DATA, "how": _METHOD}
_STATE = "state and output"

_FOLDER = "folder for the models and the table"
_DEMO = [
    _row("--out", _FOLDER, type=Path, default=Path("torchq-demo")),
    _count("--seed", "of the split, the first weights, the order of batches", 0, 0),
    _count("--epochs", "of FP32 training and of QAT, each", 1, 12),
]
_OPEN = "of an input whose sizes the file leaves open; once for each input"
_CONVERT = [
    _row("file", "NAME.onnx, NAME-symbol.json, NAME.prototxt", "MODEL"),
    _row("--weights", "weights that lie or are called otherwise", "FILE"),
    _row("--to", "the file to write", "FILE.pt2", required=True),
    _many("--shape", _OPEN, "1,3,224,224", default=[]),
]
_CACHE = "in place of --data: ranges of the tensors of MODEL.onnx, calib.cache"
_ENCODINGS = "the same, from AIMET's encodings beside MODEL.onnx"
_QUANTIZE = {
    "what to quantize": _SOURCE,
    "calibration data": [
        *_DATA,
        [_row("--cache", _CACHE, "FILE"), _row("--encodings", _ENCODINGS, "FILE")],
    ],
    "how": _METHOD,
    "output": [*_OUTPUT, [_ROWS, _JSON]],
    "comparison with the float model": [*_COMPARISON, *_REPORT],
}
_INSPECT = [
    _row("file", "a file that was exported", "MODEL.onnx"),
    _row(
        "--target", "the runtime that it is for (default: as it says)", choices=TARGETS
    ),
    _JSON,
]
_OUT = _row("--out", ".html, .json or .txt (default: print text)", "FILE")
_FORMATS = ["w8a8", "w4a8", "w4a4"]
_PLAN = [
    *_LOAD,
    _ROWS,
    _many("--budget", "such as mean_bits=5", "KIND=NUMBER", default=[]),
    _row("--formats", "to choose from", "FORMAT", nargs="+", default=_FORMATS),
    _row("--out", "write the config, for --recipe", "FILE.json"),
]

_TARGETS = "runtimes, those of torchq.targets() (default: all that are here)"
_FORECAST = [
    _row("--targets", _TARGETS, "NAME", nargs="+", choices=TARGETS),
    _row(
        "--shape", "of the input (default: that of the file, or images)", "1,3,224,224"
    ),
    _count("--threads", "that compute a call", 1, 1),
    _row("--out", "a folder for the files of runtimes that are not here", "FOLDER"),
]

#: Command -> its help, its groups of arguments, and an example of these. What carries it out is in
#: RUNS of torchq/cli/run.py.
COMMANDS: dict[str, tuple[str, dict[str, list[Any]], str]] = {
    "demo": (
        "train, quantize, export and verify a small network",
        {"options": _DEMO},
        "--out torchq-demo",
    ),
    "convert": (
        "turn ONNX, MXNet or Caffe files into torch.export's",
        {"options": _CONVERT},
        "resnet-symbol.json --to resnet.pt2",
    ),
    "quantize": (
        "quantize, calibrate and export your own model",
        _QUANTIZE,
        "--model torchvision:resnet18 --data photos/ --export resnet18.onnx --report report.html",
    ),
    "forecast": (
        "say whether INT8 pays on a runtime, before any other work",
        {"what to time": [*_SOURCE, *_FORECAST]},
        "--model torchvision:mobilenet_v2 --threads 1",
    ),
    "doctor": (
        "look for mistakes in a quantized model",
        {**_ANALYSIS, "comparison": _COMPARISON, _STATE: _LOAD},
        "--model mypackage.models:build --data photos/",
    ),
    "report": (
        "write everything about a quantized model on one page",
        {**_ANALYSIS, "comparison": _COMPARISON, _STATE: [*_LOAD, _OUT]},
        "--model torchvision:resnet18 --data photos/ --labels --out report.html",
    ),
    "inspect": (
        "say what is quantized in an ONNX file",
        {"options": _INSPECT},
        "model.onnx",
    ),
    "plan": (
        "say what would be quantized, or choose formats by budget",
        {**_ANALYSIS, _STATE: _PLAN},
        "--model mypackage.models:build --data photos/ --budget mean_bits=5 --formats 4 6 8 "
        "--out config.json",
    ),
}


def _words_of(groups: Mapping[str, list[Any]]) -> str:
    """Return what stands behind a command: its options, and the file that some read."""
    words = ["[options]"]
    rows = [row for rows in groups.values() for row in rows]
    for flag, settings in chain.from_iterable(
        row if type(row) is list else [row] for row in rows
    ):
        if not flag.startswith("-"):
            name = settings["metavar"]
            words.append(f"[{name}]" if settings.get("nargs") == "?" else name)
        elif settings.get("required"):
            words.append(f"{flag} {settings['metavar']}")
    return " ".join(words)


def build_parser() -> Parser:
    """Return the parser, with all its help."""
    formatted: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    description = "Quantize PyTorch models by swapping modules."
    parser = Parser(
        prog="torchq", description=description, epilog=_EXAMPLES, **formatted
    )
    parser.add_argument("--version", action="version", version=f"torchq {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (help_text, groups, example) in COMMANDS.items():
        child = commands.add_parser(
            name,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}.",
            # One of argparse's own names every option twice, and fills a screen.
            usage=f"torchq {name} {_words_of(groups)}",
            epilog=f"example:\n  torchq {name} {example}",
            **formatted,
        )
        repeatable = set()
        for title, rows in groups.items():
            group = child.add_argument_group(title)
            for row in rows:
                place: Any = (
                    group.add_mutually_exclusive_group() if type(row) is list else group
                )
                for flag, settings in row if type(row) is list else [row]:
                    place.add_argument(flag, **settings)
                    if settings.get("action") == "append":
                        repeatable.add(flag)
        child.repeatable = frozenset(repeatable)
    parser.children = dict(commands.choices)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command (None: of the process), or print the help; return the exit code."""
    parser = build_parser()
    words = sys.argv[1:] if argv is None else argv
    for each in (parser, *parser.children.values()):
        each.words = words
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        # By name: an import above would load torch for each --help.
        exit_code: int = importlib.import_module("torchq.cli.run").run(args)
        return exit_code
    except (TorchqError, OSError) as error:
        print(f"torchq {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"torchq {args.command}: interrupted", file=sys.stderr)
        return 130
