"""``python -m torchq.compat script.py args`` runs a pytorch-quantization script unchanged."""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from torchq.compat import SHIM, install
from torchq.compat.older_exporter import older_exporter_by_default


def main(arguments: Sequence[str] | None = None) -> None:
    """Install the old names, also for processes that start later, and run a script or module.

    While it runs, exports take the exporter that was torch's default when such scripts were made.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchq.compat",
        description="Run a pytorch-quantization script on torchq.",
    )
    parser.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the next argument is a module, not a file",
    )
    parser.add_argument("script", help="the script to run")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="what the script gets"
    )
    options = parser.parse_args(arguments)
    install()
    # Worker processes import the script again. They find the old names on the search path.
    sys.path.append(SHIM)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), SHIM])
    )
    sys.argv = [options.script, *options.arguments]
    with older_exporter_by_default():
        if options.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(options.script).resolve().parent))
            runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
