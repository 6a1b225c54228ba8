"""What a few batches show: which quantizers are called, on what, and who feeds whom."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.analysis.layers import passing
from torchq.graph import tensors_in
from torchq.nn import TensorQuantizer
from torchq.utils import untouched


@dataclass
class Observation:
    """What was seen of quantizers, by their ids, and of modules, by their paths."""

    example: Any  # the first batch
    batches: int = 0
    reached: set[int] = field(default_factory=set)
    not_finite: set[int] = field(default_factory=set)  # given NaN or infinity by the float model
    # Adding a quantized tensor to one that is neither quantized nor the result of a layer.
    one_sided: list[str] = field(default_factory=list)
    norms: dict[str, str] = field(default_factory=dict)  # BatchNorm -> the layer before it


def observe(
    model: nn.Module,
    known: dict[str, TensorQuantizer],
    batches: Iterable[Any],
    run: Callable[[Any], Any],
) -> Observation | None:
    """Run ``model`` in float on batches and return what was seen; None without any batch.

    Who feeds whom is read from one more run of the first batch, with the quantizers as they are.
    """
    found: Observation | None = None
    with untouched(model):
        for batch in batches:
            if found is None:
                found = Observation(batch)
                _follow(model, found, run)
            with passing(known.values()), _values(known, found):
                run(batch)
            found.batches += 1
    return found


@contextmanager
def _values(known: dict[str, TensorQuantizer], found: Observation) -> Iterator[None]:
    """Note which quantizers are called, and which with values that are not finite."""

    def note(quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        found.reached.add(id(quantizer))
        if not bool(torch.isfinite(args[0]).all()):
            found.not_finite.add(id(quantizer))

    with ExitStack() as stack:
        for quantizer in known.values():
            stack.callback(quantizer.register_forward_pre_hook(note).remove)
        yield


def _follow(model: nn.Module, found: Observation, run: Callable[[Any], Any]) -> None:
    """Run the first batch and note additions and BatchNorms."""
    flow = _Flow(model, found)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            enter = module.register_forward_pre_hook(flow.entering(path))
            leave = module.register_forward_hook(flow.leaving(path), always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        with flow:
            run(found.example)


class _Flow(TorchFunctionMode):
    """Notes which module returned each tensor, while it is active."""

    def __init__(self, model: nn.Module, found: Observation) -> None:
        super().__init__()
        self._found = found
        self._stack: list[str] = []
        self._made_by: dict[int, tuple[str, nn.Module]] = {}
        self._alive: list[Any] = []  # An id is unique only as long as its tensor lives.

    def entering(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._stack.append(path)
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and args:
                maker = self._made_by.get(id(args[0]))
                if maker is not None:
                    self._found.norms[path] = maker[0]

        return enter

    def leaving(self, path: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()
            # A container returns what its last child made; these leaves return their input.
            passes_on = isinstance(module, (nn.Identity, TensorQuantizer)) or _has_children(module)
            for tensor in tensors_in(output):
                if not (passes_on and id(tensor) in self._made_by):
                    self._made_by[id(tensor)] = (path, module)
                    self._alive.append(tensor)

        return leave

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out ``func``, and note an addition."""
        name = getattr(func, "__name__", "")
        if name in _ADDITIONS and len(args) >= 2 and _same_shape(args[0], args[1]):
            makers = [m and m[1] for m in (self._made_by.get(id(arg)) for arg in args[:2])]
            quantized = [isinstance(m, TensorQuantizer) and m.quantizing for m in makers]
            is_one = sum(quantized) == 1
            if is_one and not _is_linear(makers[quantized.index(False)]):
                self._found.one_sided.append(self._stack[-1] if self._stack else "")
        result = func(*args, **(kwargs or {}))
        if _IN_PLACE.fullmatch(name) and args:
            # The tensor is no longer what its module returned.
            self._made_by.pop(id(args[0]), None)
        return result


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


_IN_PLACE = re.compile(r"[a-z]\w*_|__i[a-z]+__")
_ADDITIONS = frozenset(["add", "add_", "__add__", "__iadd__", "__radd__"])


def _same_shape(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dim() > 1


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def _is_linear(module: nn.Module | None) -> bool:
    """Return True for a convolution, linear layer or BatchNorm, into which an addition is fused."""
    norm = nn.modules.batchnorm._BatchNorm
    return isinstance(module, (*_CONVOLUTIONS, norm)) or "ConvTranspose" in type(module).__name__
