"""Granularities: the groups of elements that share one amax, as frozen values.

An amax always has as many dimensions as its tensor (or none, per tensor), so that it broadcasts:

=====================  ==================  =====================
granularity            tensor shape        amax shape
=====================  ==================  =====================
``PerTensor()``        (N, C, H, W)        ()
``PerAxis((0,))``      (O, I, kH, kW)      (O, 1, 1, 1)
``PerAxis((0, 1))``    (O, I, kH, kW)      (O, I, 1, 1)
``PerBlock(32, -1)``   (O, I)              (O, ceil(I / 32))
=====================  ==================  =====================
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.errors import ConfigError


@dataclass(frozen=True)
class Granularity:
    """Base of the ways to divide a tensor into groups that share an amax."""

    def amax_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the amax for a tensor of ``shape``."""
        raise NotImplementedError

    def split(self, x: Tensor) -> Tensor:
        """Return ``x`` in the form that :meth:`align` broadcasts against.

        It is ``x`` itself, or ``x`` padded with zeros to whole blocks, with the blocks unfolded.
        """
        return x

    def join(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Undo :meth:`split` for a result of the same shape; ``shape`` is the original one."""
        return x

    def align(self, amax: Tensor, shape: torch.Size) -> Tensor:
        """Return a view of ``amax`` that broadcasts against :meth:`split` of a tensor.

        Args:
            amax: of the shape that :meth:`amax_shape` returns, or of one of the legacy shapes
                ``[]``, ``[1]`` and ``[C]``.
            shape: of the tensor.

        Raises:
            ConfigError: the shape of ``amax`` is none of these.
        """
        raise NotImplementedError

    def reduce_dims(self, ndim: int) -> tuple[int, ...]:
        """Return the dimensions that one amax covers in ``split(x)`` of ``ndim`` dimensions."""
        raise NotImplementedError

    def amax(self, x: Tensor) -> Tensor:
        """Return the largest magnitude of each group, in the dtype of ``x``.

        An empty group gives 0; NaN propagates.
        """
        parts = self.split(x.detach())
        dims = self.reduce_dims(parts.dim())
        if x.numel() == 0:
            return x.new_zeros(self.amax_shape(x.shape))
        if not dims:
            return parts.abs()
        largest = torch.linalg.vector_norm(parts, float("inf"), dim=dims, keepdim=True)
        result: Tensor = largest.view(self.amax_shape(x.shape))
        return result


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One amax for the whole tensor, 0-d."""

    def amax_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the amax for a tensor of ``shape``."""
        return ()

    def reduce_dims(self, ndim: int) -> tuple[int, ...]:
        """Return the dimensions that one amax covers."""
        return tuple(range(ndim))

    def align(self, amax: Tensor, shape: torch.Size) -> Tensor:
        """Return a view of ``amax`` that broadcasts."""
        if amax.numel() != 1:
            raise ConfigError(
                f"amax has shape {tuple(amax.shape)}; expected one value, per tensor"
            )
        return amax.view(())


@dataclass(frozen=True)
class PerAxis(Granularity):
    """One amax for each index of ``axes``; negative axes count from the end."""

    axes: tuple[int, ...]

    def _axes(self, ndim: int) -> tuple[int, ...]:
        """Return the axes as they count from the front."""
        for axis in self.axes:
            if not -ndim <= axis < ndim:
                raise ConfigError(
                    f"axis {axis}: the tensor has {ndim} dimensions; expected {-ndim} to {ndim - 1}"
                )
        return tuple(axis % ndim for axis in self.axes)

    def amax_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the amax for a tensor of ``shape``."""
        axes = self._axes(len(shape))
        return tuple(size if dim in axes else 1 for dim, size in enumerate(shape))

    def reduce_dims(self, ndim: int) -> tuple[int, ...]:
        """Return the dimensions that one amax covers."""
        axes = self._axes(ndim)
        return tuple(dim for dim in range(ndim) if dim not in axes)

    def align(self, amax: Tensor, shape: torch.Size) -> Tensor:
        """Return a view of ``amax`` that broadcasts."""
        expected = self.amax_shape(shape)
        if amax.shape == expected:
            return amax
        if amax.numel() == 1:
            return amax.view(())
        has_one_axis = amax.dim() == 1 and len(self.axes) == 1
        if has_one_axis and amax.numel() == max(expected, default=1):
            return amax.view(expected)
        raise ConfigError(
            f"amax has shape {tuple(amax.shape)}; expected {expected} for axis {self.axes} "
            f"of a tensor of shape {tuple(shape)}"
        )


@dataclass(frozen=True)
class PerBlock(Granularity):
    """One amax for each run of ``size`` elements along ``axis``; the last block may be shorter."""

    size: int
    axis: int = -1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"block_size: got {self.size}; expected at least 1")

    def amax_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the amax for a tensor of ``shape``."""
        axis = self._axis(len(shape))
        blocks = -(-shape[axis] // self.size)  # rounded up
        return (*shape[:axis], blocks, *shape[axis + 1 :])

    def _axis(self, ndim: int) -> int:
        """Return the axis as it counts from the front."""
        if not -ndim <= self.axis < ndim:
            raise ConfigError(
                f"block axis {self.axis}: the tensor has {ndim} dimensions; "
                f"expected {-ndim} to {ndim - 1}"
            )
        return self.axis % ndim

    def split(self, x: Tensor) -> Tensor:
        """Return ``x`` in whole blocks, unfolded."""
        axis = self._axis(x.dim())
        missing = -x.shape[axis] % self.size
        if missing:
            # Two numbers for each dimension, the last dimension first.
            behind = [0, 0] * (x.dim() - 1 - axis)
            x = torch.nn.functional.pad(x, [*behind, 0, missing])
        result: Tensor = x.unflatten(axis, (x.shape[axis] // self.size, self.size))
        return result

    def join(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Undo :meth:`split`."""
        axis = self._axis(len(shape))
        x = x.flatten(axis, axis + 1)
        if x.shape[axis] == shape[axis]:
            return x
        if torch.compiler.is_dynamo_compiling():
            # The same view, but one that Inductor computes as a buffer of whole blocks. It would
            # fuse narrow() into a loop over the shorter axis, and that loop reads memory that
            # nobody wrote (torch 2.9 to 2.15 on CPUs).
            view = torch.as_strided(x, shape, x.stride())
        else:
            view = x.narrow(axis, 0, shape[axis])
        return view.clone()  # Dense, without the padding.

    def reduce_dims(self, ndim: int) -> tuple[int, ...]:
        """Return the dimensions that one amax covers."""
        return (self._axis(ndim - 1) + 1,)

    def align(self, amax: Tensor, shape: torch.Size) -> Tensor:
        """Return a view of ``amax`` that broadcasts."""
        expected = self.amax_shape(shape)
        if amax.numel() == 1 and amax.dim() <= 1:
            return amax.view(())
        if amax.shape != expected:
            raise ConfigError(
                f"amax has shape {tuple(amax.shape)}; "
                f"expected {expected}: blocks of {self.size} on axis {self.axis}"
            )
        return amax.unsqueeze(self._axis(len(shape)) + 1)
