"""``python -m torchq`` is the command ``torchq``."""

from __future__ import annotations

import sys

from torchq.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
