"""Replaces itself by :mod:`torchq.compat.pytorch_quantization`.

Processes that were started with this folder on their search path import it by the old name.
"""

import torchq.compat

STANDS_FOR = torchq.compat.pytorch_quantization.__name__

torchq.compat.install()
