"""The kernels of fake quantization: one definition, and others that equal it bit for bit.

=============  ================================================  =================================
backend        where                                             how
=============  ================================================  =================================
``reference``  anywhere; always if compiled or transformed       whole-tensor operations
``tiled``      CPU                                               the same on cache-sized tiles
``triton``     CUDA, inside ``use_backend("triton")``             one pass, gradient mask included
=============  ================================================  =================================
"""

from torchq.functional.kernels.dispatch import (
    BACKENDS,
    backend_for,
    kernels,
    use_backend,
)

__all__ = ["BACKENDS", "backend_for", "kernels", "use_backend"]
