"""One run of a model in two versions: quantized, and in float.

Two runs of a model need not see the same thing: each draws its own noise, sends other tokens to
other experts, and takes other branches where numbers lie close to a border. Here every function of
torch that a forward calls runs twice, on the quantized numbers and on what these would be in float.
Whole numbers, truth values and what Python reads come from the quantized version, random numbers
are drawn once, and so both versions go the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from torchq.graph import floats_in, map_tensors, tensors_in
from torchq.nn import QuantModule, TensorQuantizer, switched_off
from torchq.utils import repeated_draws

#: Functions of values and their places -> where they take the dimension. The places are those of
#: the quantized version, so that values of the float one are read there.
_WITH_PLACES = {
    "max": 1,
    "min": 1,
    "median": 1,
    "nanmedian": 1,
    "mode": 1,
    "sort": 1,
    "topk": 2,
}

#: Sees a call of a module in both versions: ``see(module, result, float result)`` returns the
#: quantized result that the model goes on with.
See = Callable[[nn.Module, Any, Any], Any]


class TwoVersions(TorchFunctionMode):
    """A context in which tensors have a float version beside their quantized numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._float_versions = WeakTensorKeyDictionary()
        self._is_paused = False
        self._read: set[int] = set()

    def float_version(self, value: object) -> Any:
        """Return a value with the float versions of its tensors, where there are any."""
        return map_tensors(
            value, lambda tensor: self._float_versions.get(tensor, tensor)
        )

    def reads(self, tensor: Tensor) -> bool:
        """Return True if a function outside of the watched modules was called with a tensor."""
        return id(tensor) in self._read

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with the quantized numbers, and with the float ones."""
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if not any(tensor in self._float_versions for tensor in tensors):
            result = func(*args, **kwargs)
            self._note_parameters(tensors, result)
            return result
        written = _written(func, args, kwargs)
        if written is not None and written not in self._float_versions:
            self._float_versions[written] = written.clone()
        with repeated_draws(*tensors, generator=kwargs.get("generator")) as rewind:
            result = func(*args, **kwargs)
            self._note_parameters(tensors, result)
            if written is None and not floats_in(result):
                return result
            rewind()
            self.join(result, self._in_float(func, args, kwargs, result))
        return result

    def _note_parameters(self, tensors: Iterable[Tensor], result: object) -> None:
        """Note the parameters that a function computed with; shapes and types are no numbers."""
        if any(True for _ in tensors_in(result)):
            self._read.update(id(t) for t in tensors if isinstance(t, nn.Parameter))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let functions run once, as without this context, inside the ``with`` block."""
        before = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before

    def _in_float(self, func: Any, args: Any, kwargs: Any, result: object) -> object:
        """Return what a function gives for the float versions; None where it does not take them."""
        args, kwargs = self.float_version((args, kwargs))
        try:
            # Some functions return pairs (values, indices); a tensor has a method of that name.
            places = (
                getattr(result, "indices", None) if isinstance(result, tuple) else None
            )
            position = _WITH_PLACES.get(getattr(func, "__name__", ""))
            if places is not None and position is not None:
                return _values_at(places, position, args, kwargs)
            return func(*args, **kwargs)
        except (RuntimeError, IndexError):  # The versions have other shapes by now.
            return None

    def join(self, result: object, in_float: object) -> None:
        """Let tensors of a result have those of another one as their float versions."""
        for tensor, version in zip(
            floats_in(result), floats_in(in_float), strict=False
        ):
            if tensor.shape == version.shape:
                self._float_versions[tensor] = version

    @contextmanager
    def watching(self, model: nn.Module, see: See | None = None) -> Iterator[None]:
        """Run quantized modules in both versions as a whole: with their quantizers on, and off."""
        with ExitStack() as stack:
            for module in quantizing_modules(model):
                plain: object = module.forward
                stack.enter_context(
                    forward_replaced(module, partial(self._call, module, plain, see))
                )
            yield

    def _call(
        self, module: nn.Module, plain: Any, see: See | None, *args: Any, **kw: Any
    ) -> object:
        if self._is_paused:
            return plain(*args, **kw)
        float_args, float_kw = self.float_version((args, kw))
        with self.paused():
            with repeated_draws(*tensors_in((args, kw))) as rewind:
                result = plain(*args, **kw)
                rewind()
                in_float = float_call(module, plain, float_args, float_kw)
            result = result if see is None else see(module, result, in_float)
        self.join(result, in_float)
        return result


def quantizing_modules(model: nn.Module) -> list[nn.Module]:
    """Return the quantizers, and the quantized modules that hold no other quantized module."""
    return [
        module
        for module in model.modules()
        if isinstance(module, TensorQuantizer)
        or (isinstance(module, QuantModule) and _is_innermost(module))
    ]


def _is_innermost(module: nn.Module) -> bool:
    return not any(
        isinstance(part, QuantModule) for part in module.modules() if part is not module
    )


def float_call(
    module: nn.Module, forward: Any, args: Iterable[Any], kwargs: Any
) -> Any:
    """Return what a module computes with all of its quantizers off."""
    inner_quantizers = [
        part for part in module.modules() if isinstance(part, TensorQuantizer)
    ]
    with switched_off(inner_quantizers):
        return forward(*args, **kwargs)


@contextmanager
def computing_alone_in_float(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let some modules of a quantized model compute in float, inside the ``with`` block.

    Quantizers that they share with others quantize for those.
    """
    with ExitStack() as stack:
        for module in modules:
            plain = partial(_in_float, module, module.forward)
            stack.enter_context(forward_replaced(module, plain))
        yield


def _in_float(
    module: nn.Module, forward: object, *args: object, **kwargs: object
) -> object:
    return float_call(module, forward, args, kwargs)


@contextmanager
def forward_replaced(
    module: nn.Module, forward: Callable[..., object]
) -> Iterator[None]:
    """Let a module run another forward inside the ``with`` block, between its own hooks."""
    attributes = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the floating-point tensor that a function writes into; None if it does not."""
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out if out.is_floating_point() else None
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    is_write = in_place or name == "__setitem__" or name in _IN_PLACE_OPERATORS
    is_write = is_write or bool(kwargs.get("inplace"))
    target = args[0] if args else None
    is_float = isinstance(target, Tensor) and target.is_floating_point()
    return target if is_write and is_float else None


#: ``x += y`` and its like, as Tensor has them.
_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "div")
)


def _values_at(places: Tensor, position: int, args: Any, kwargs: Any) -> Tensor:
    """Return the values of a tensor at places along the dimension that a function was given."""
    x: Tensor = args[0] if args else kwargs["input"]
    dim = kwargs.get("dim", args[position] if len(args) > position else -1)
    keeps = places.dim() == x.dim()
    values = x.gather(dim, places if keeps else places.unsqueeze(dim))
    return values if keeps else values.squeeze(dim)
