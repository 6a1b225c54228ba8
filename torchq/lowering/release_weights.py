"""Freeing the plain weights of deployed layers whose kernels hold a packed copy.

A kernel computes from a copy of the weight in its own memory layout. Once there is one, a layer
does not need the plain weight any more: it can be unpacked from the other without loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor, nn

from torchq.lowering.packed import packed_weight, unpack_weight
from torchq.utils import calls_are_recorded

_BUFFER = "weight_codes"
#: The attributes of a released layer: the packed weight, and the shape of the plain one.
_PACKED, _SHAPE = "_packed_weight", "_plain_shape"
#: True once a reader of the buffers, such as a compiler, relies on the plain weight.
_READ = "_plain_weight_is_read"


class _LazyBuffers(dict[str, Any]):
    """The buffers of a released layer; whoever reads them brings the plain weight back.

    Compilers, exporters and ``module.buffers()`` read them. State dicts, files, copies and
    attributes do not: they get a plain weight of their own. ``module.eval()`` only asks whether
    there is a buffer of some name, which does not bring the weight back.
    """

    def __init__(self, owner: ReleasableWeightMixin, others: dict[str, Any]) -> None:
        super().__init__(others)
        self._owner, self.others = owner, dict(others)

    def _all(self) -> dict[str, Any]:
        vars(self._owner)[_READ] = True
        return self._restored()

    def _restored(self) -> dict[str, Any]:
        """Return the buffers that have taken the place of these."""
        self._owner.restore_weight()
        buffers: dict[str, Any] = vars(self._owner)["_buffers"]
        return buffers

    def __contains__(self, name: object) -> bool:
        return name == _BUFFER or name in self.others

    def __setitem__(self, name: str, value: Any) -> None:
        self._restored()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._restored()[name]

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def get(self, name: str, default: Any = None) -> Any:
        return self._all().get(name, default)

    def keys(self) -> Any:
        return self._all().keys()

    def items(self) -> Any:
        return self._all().items()

    def values(self) -> Any:
        return self._all().values()


class ReleasableWeightMixin(nn.Module):
    """Mixin for layers that keep kernels, and that can do without the plain copy of their weight.

    A released layer computes from the weight that is packed for its kernel. Whoever asks for
    :attr:`weight_codes` gets a new plain tensor, unpacked without loss; state dicts, files and
    copies contain it. Reading its buffers, moving the layer or loading a state dict restores it.
    """

    def release_weight(self) -> int:
        """Drop the plain weight if a kernel holds a packed copy; return the bytes freed."""
        buffers = vars(self)["_buffers"]
        plain = None if isinstance(buffers, _LazyBuffers) else buffers.get(_BUFFER)
        if plain is None:
            return 0
        packed = vars(self)["_kernels"].get(_PACKED)
        packed = packed_weight(plain) if packed is None else packed
        if packed is None:
            return 0
        # Past __setattr__, which would drop the kernels.
        vars(self).update({_PACKED: packed, _SHAPE: plain.shape})
        vars(self)["_buffers"] = _LazyBuffers(self, self._other_buffers())
        return int(plain.numel() * plain.element_size())

    def drop_weight(self) -> None:
        """Release this weight alone, unless a reader of the buffers has brought it back before."""
        if not vars(self).get(_READ, False):
            ReleasableWeightMixin.release_weight(self)

    def restore_weight(self) -> None:
        """Keep a plain weight again."""
        if _PACKED in vars(self):
            vars(self)["_buffers"] = self._whole_buffers()
            # As long as no attribute changes, the packed weight can take its place again.
            vars(self)["_kernels"][_PACKED] = vars(self)[_PACKED]
            for name in (_PACKED, _SHAPE):
                del vars(self)[name]

    def _whole_buffers(self) -> dict[str, Tensor | None]:
        """Return the buffers of a released layer with its plain weight."""
        with torch.inference_mode(False):  # an ordinary tensor, which can be loaded into
            plain = unpack_weight(vars(self)[_PACKED], vars(self)[_SHAPE])
        return {_BUFFER: plain, **self._other_buffers()}

    def _other_buffers(self) -> dict[str, Tensor | None]:
        """Return the buffers without the plain weight, which stays as it is."""
        buffers = vars(self)["_buffers"]
        kept = buffers.others if isinstance(buffers, _LazyBuffers) else buffers
        return {name: buffer for name, buffer in kept.items() if name != _BUFFER}

    def released_bytes(self) -> int:
        """Return the bytes of the weight where it is released, else 0."""
        return math.prod(vars(self).get(_SHAPE, (0,)))

    def __getattr__(self, name: str) -> Any:
        # Compilers read the buffers themselves, which restores the weight.
        if _PACKED not in self.__dict__ or calls_are_recorded():
            return super().__getattr__(name)
        if name == _BUFFER:
            return unpack_weight(self.__dict__[_PACKED], self.__dict__[_SHAPE])
        others = self._other_buffers()
        if name not in others:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return others[name]

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            # The process that starts reads the weight in shared memory, so it has to stay there.
            self.restore_weight()
        state: dict[str, Any] = dict(super().__getstate__())
        if _PACKED in state:
            state["_buffers"] = self._whole_buffers()
            for name in (_PACKED, _SHAPE):
                del state[name]
        return state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Write the buffers of a released layer with its weight, which is not kept."""
        if _PACKED not in vars(self):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        lazy, whole = vars(self)["_buffers"], self._whole_buffers()
        vars(self)["_buffers"] = whole
        try:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        finally:
            vars(self)["_buffers"] = lazy

    def _load_from_state_dict(self, *args: Any) -> None:
        self.restore_weight()
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.restore_weight()
        return super()._apply(fn, recurse)


def release_weights_(model: nn.Module) -> int:
    """Drop the plain weights that a deployed model no longer needs, in place.

    Layers do this by themselves once a kernel holds a packed copy. What reads the buffers of a
    model (a compiler, an exporter, ``model.buffers()``) brings the plain weights back to stay; this
    drops them again. State dicts, files, copies, moves and images of other sizes unpack what they
    need.

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
        >>> count = len(list(int8.buffers()))
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
