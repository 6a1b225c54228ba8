"""The command line: ``torchq`` and ``python -m torchq``. Thin: parse, call the library, print."""

from torchq.cli.main import main

__all__ = ["main"]
