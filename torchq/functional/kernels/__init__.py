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
    is_plain,
    kernels,
    learned_gradients,
    mask_gradient,
    use_backend,
)
from torchq.functional.kernels.reference import (
    affine_gradients,
    clamped_codes,
    gradient_mask,
    snap,
)
from torchq.functional.kernels.tiled import largest_magnitude
from torchq.functional.kernels.views import group_view, pieces

__all__ = [
    "BACKENDS",
    "affine_gradients",
    "backend_for",
    "clamped_codes",
    "gradient_mask",
    "group_view",
    "is_plain",
    "kernels",
    "largest_magnitude",
    "learned_gradients",
    "mask_gradient",
    "pieces",
    "snap",
    "use_backend",
]
