"""What do ``import torchq``, ``quantize_`` and ``torchq --help`` take beside ``import torch``?

Names of torchq load their modules at their first use, so there are three figures: the import alone,
torch with ``quantize_``, and torch with each public name. Processes are started in turns, one after
the other; the figures are processor seconds, as those of the clock belong to what else the machine
does. The ratio is taken inside each round. Python keeps what it compiled, as it does where a
package was installed.

Example:
    python -m benchmarks.import_time --out benchmarks/results/import_time.jsonl
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.harness import Reporter, parse, parser
from torchq.utils.timing import quartiles

PROGRAMS = {
    "torch": ("-c", "import torch"),
    "torchq": ("-c", "import torchq"),
    "quantize_": ("-c", "import torch; from torchq import quantize_"),
    "all names": ("-c", "import torch; from torchq import *"),
    "help": ("-m", "torchq", "--help"),
}


def seconds(arguments: Sequence[str], compiled: str) -> float:
    """Return the processor time of a Python process."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = os.times()
    subprocess.run(
        [sys.executable, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write a row."""
    options = parse(parser(__doc__), argv)
    with tempfile.TemporaryDirectory() as compiled:
        for program in PROGRAMS.values():
            seconds(program, compiled)
        rounds = [
            {name: seconds(program, compiled) for name, program in PROGRAMS.items()}
            for _ in range(options.rounds)
        ]
    ratios = {
        name: [
            round(part, 3)
            for part in quartiles(tuple(r[name] / r["torch"] for r in rounds))
        ]
        for name in PROGRAMS
        if name != "torch"
    }
    medians = {
        name: round(quartiles(tuple(r[name] for r in rounds))[1], 3)
        for name in PROGRAMS
    }
    with Reporter("import_time", options.out) as report:
        report.value(
            case="import",
            seconds=medians,
            quartiles_beside_torch=ratios,
        )


if __name__ == "__main__":
    main()
