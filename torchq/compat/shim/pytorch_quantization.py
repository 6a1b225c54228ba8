"""Found as ``pytorch_quantization`` by processes that were started with this folder on their search path; replaces itself."""

from __future__ import annotations

import torchq.compat

__all__ = ["STANDS_FOR"]

STANDS_FOR = torchq.compat.pytorch_quantization.__name__

torchq.compat.install()
