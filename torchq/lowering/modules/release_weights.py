"""Freeing the plain weights of deployed layers whose kernels hold a packed copy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import QuantizationError
from torchq.lowering.ops.onednn import packed_weight, unpack_weight

__all__ = ["ReleasableWeightMixin", "release_weights_", "restore_weights_"]

_BUFFER = "weight_codes"
#: The attributes of a released layer: the packed weight, and the shape of the plain one.
_PACKED, _SHAPE = "_packed_weight", "_plain_shape"


class ReleasableWeightMixin(nn.Module):
    """Mixin for layers that can do without the plain copy of their weight.

    A released layer computes from the weight that is packed for its kernel. Whoever asks for
    :attr:`weight_codes` gets a new plain tensor, unpacked without loss; state dicts, files and
    copies contain it. Moving the layer or loading a state dict restores it.
    """

    def release_weight(self) -> int:
        """Drop the plain weight if a kernel holds a packed copy; return the bytes freed."""
        plain = self._buffers.get(_BUFFER)
        packed = None if plain is None else packed_weight(plain)
        if plain is None or packed is None:
            return 0
        # Past __setattr__, which would drop the kernels.
        vars(self).update({_PACKED: packed, _SHAPE: plain.shape})
        vars(self)["_buffers"] = {n: b for n, b in self._buffers.items() if n != _BUFFER}
        return plain.numel() * plain.element_size()

    def restore_weight(self) -> None:
        """Keep a plain weight again."""
        if _PACKED in vars(self):
            vars(self)["_buffers"] = self._whole_buffers()
            for name in (_PACKED, _SHAPE):
                del vars(self)[name]

    def _whole_buffers(self) -> dict[str, Tensor | None]:
        """Return the buffers of the layer with its plain weight."""
        return {_BUFFER: unpack_weight(vars(self)[_PACKED], vars(self)[_SHAPE]), **self._buffers}

    def released_bytes(self) -> int:
        """Return the bytes of the weight where it is released, else 0."""
        return math.prod(vars(self).get(_SHAPE, (0,)))

    def __getattr__(self, name: str) -> Any:
        if name == _BUFFER and _PACKED in self.__dict__:
            if torch.compiler.is_compiling():
                raise QuantizationError(
                    f"{type(self).__name__}: got a layer without its plain weight; expected one "
                    "to compile or export. Call torchq.lowering.restore_weights_(model) first"
                )
            return unpack_weight(self.__dict__[_PACKED], self.__dict__[_SHAPE])
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        if _PACKED in state:
            state["_buffers"] = self._whole_buffers()
            for name in (_PACKED, _SHAPE):
                del state[name]
        return state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if _PACKED in vars(self):
            destination[prefix + _BUFFER] = self._whole_buffers()[_BUFFER]
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.restore_weight()
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.restore_weight()
        return super()._apply(fn, recurse)


def release_weights_(model: nn.Module) -> int:
    """Drop the plain weights that a deployed model no longer needs, in place.

    A kernel computes from a copy of the weight in its own memory layout. After the model has run,
    both lie in memory; this drops the plain one, which can be unpacked from the other without
    loss. State dicts, files, copies, moves and images of other sizes work as before, and unpack
    what they need. Compilers and exporters need the plain weights: see :func:`restore_weights_`.

    Args:
        model: deployed, on the CPU, that has run.

    Returns:
        The number of bytes dropped; 0 where no layer has run on a oneDNN kernel.

    Example:
        >>> x = torch.randn(1, 8)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).eval()
        >>> report = torchq.quantize_(model)
        >>> report = torchq.calibrate(model, [x], progress=False)
        >>> int8 = torchq.deploy(model)
        >>> y = int8(x)
        >>> release_weights_(int8) in (0, 8 * 16 + 16 * 4)
        True
        >>> torch.equal(int8(x), y)
        True
    """
    layers = [m for m in model.modules() if isinstance(m, ReleasableWeightMixin)]
    return sum(layer.release_weight() for layer in layers)


def restore_weights_(model: nn.Module) -> None:
    """Keep the plain weights of a deployed model again, in place.

    Args:
        model: deployed; nothing happens to weights that were not released.
    """
    for layer in model.modules():
        if isinstance(layer, ReleasableWeightMixin):
            layer.restore_weight()
