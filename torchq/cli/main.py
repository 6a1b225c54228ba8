"""The program: arguments, errors and exit codes."""

import sys
from collections.abc import Sequence

from torchq.cli.analyse import run_doctor, run_inspect, run_plan, run_report
from torchq.cli.convert import run_convert
from torchq.cli.demo import run_demo
from torchq.cli.files import check_paths
from torchq.cli.parser import build_parser
from torchq.cli.quantize import run_quantize
from torchq.errors import TorchqError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command (None: of the process), or print the help; return the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        check_paths(args)
        if hasattr(args, "model"):
            args.model = args.model or args.file
        return _RUN[args.command](args)
    except (TorchqError, OSError) as error:
        print(f"torchq {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"torchq {args.command}: interrupted", file=sys.stderr)
        return 130


#: Command -> what carries it out and returns the exit code.
_RUN = {
    "demo": run_demo,
    "convert": run_convert,
    "quantize": run_quantize,
    "doctor": run_doctor,
    "report": run_report,
    "inspect": run_inspect,
    "plan": run_plan,
}
