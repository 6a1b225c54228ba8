"""The choice of a kernel for fake quantization: by the tensor, or forced for a while."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.formats import INT8, Format
from torchq.functional.kernels import reference, tiled

#: The definition, CPU tiles, and Triton on CUDA, which :func:`use_backend` alone chooses.
BACKENDS = ("reference", "tiled", "triton")

_forced: ContextVar[str | None] = ContextVar("torchq_forced_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend for plain tensors inside; nests.

    Compiled, exported and transformed (``torch.func``) code uses the definition whatever is forced.
    The choice belongs to the thread or task that makes it.

    Example:
        >>> with use_backend("reference"):
        ...     backend_for(torch.ones(3))
        'reference'
    """
    if name not in BACKENDS:
        raise ConfigError(
            f"use_backend: got {name!r}; expected one of {', '.join(BACKENDS)}"
        )
    if name == "triton" and not has_triton():
        raise ConfigError(
            "use_backend: got 'triton', which is not installed; expected an installed backend. "
            "Run pip install triton"
        )
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def backend_for(
    x: Tensor,
    amax: Tensor | None = None,
    format: Format = INT8,
    *,
    affine: bool = False,
) -> str:
    """Return the name of the backend that quantizes ``x`` now, one of :data:`BACKENDS`.

    The block axis of ``x`` is split, and ``amax`` aligned with it; None stands for one value. With
    ``affine`` the codes have a zero point.
    """
    if not is_plain(x) or not (amax is None or is_plain(amax)):
        return "reference"
    amax = x.new_ones(()) if amax is None else amax
    forced = _forced.get()
    name = forced or "tiled"
    if kernels(name).supports(x, amax, format, affine=affine):
        return name
    if forced is not None:
        raise ConfigError(
            f"fake_quantize: backend {forced!r} cannot do {format}"
            f"{' with a zero point' if affine else ''} for {x.dtype} on {x.device} "
            f"with amax of shape {tuple(amax.shape)}; expected a case that it supports. "
            "Leave the choice to torchq, or use 'reference'"
        )
    return "reference"


def takes_tiles(x: Tensor) -> bool:
    """Return True if :func:`backend_for` chooses tiles for ``x``, whatever its range and format."""
    return is_plain(x) and x.is_cpu and _forced.get() in (None, "tiled")


def is_plain(x: Tensor) -> bool:
    """Return True if a kernel may run on ``x`` now.

    It is an ordinary tensor with memory, nothing traces, and the definition is not forced.
    """
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or _forced.get() == "reference"
    ):
        return False
    if type(x) not in (Tensor, nn.Parameter) or x.is_meta:
        return False
    try:
        x.untyped_storage()
    except (NotImplementedError, RuntimeError):
        # Wrappers of torch.func have no storage, and no public name by which to recognise them.
        return False
    return True


@cache
def has_triton() -> bool:
    """Return True if Triton is installed; import nothing."""
    return importlib.util.find_spec("triton") is not None


def kernels(name: str) -> Any:
    """Return the module of a backend; :mod:`torchq.functional.kernels.reference` defines them."""
    if name == "triton":  # Importing torchq does not import Triton.
        return importlib.import_module(f"{__package__}.triton")
    return tiled if name == "tiled" else reference


def mask_gradient(name: str, grad: Tensor, mask: Tensor) -> Tensor:
    """Return ``grad`` where ``mask`` is 1, else 0, by the backend of the forward if it can.

    A second derivative, a batch of gradients (``is_grads_batched``) and unusual strides go to the
    definition.
    """
    if name == "reference" or grad.requires_grad or not is_plain(grad):
        return reference.mask_gradient(grad, mask)
    if name == "triton" and grad.stride() != mask.stride():
        return reference.mask_gradient(grad, mask)
    result: Tensor = kernels(name).mask_gradient(grad, mask)
    return result


def learned_gradients(
    name: str,
    grad: Tensor,
    x: Tensor,
    amax: Tensor,
    format: Format,
    scale_format: Format | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients to x and amax, tiled if the forward was.

    Everything else, and second derivatives, go to the definition.
    """
    # The tiled result is not differentiable, so second derivatives take the definition.
    is_first_derivative = not torch.is_grad_enabled()
    tensors_are_plain = all(map(is_plain, (grad, x, amax)))
    is_tiled = name == "tiled" and is_first_derivative and tensors_are_plain
    backend = tiled if is_tiled else reference
    result: tuple[Tensor, Tensor] = backend.learned_gradients(
        grad, x, amax, format, scale_format
    )
    return result
