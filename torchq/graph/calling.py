"""How an example or a batch becomes the arguments of one call: the one rule for all of torchq.

A tensor is the one argument. A mapping holds keyword arguments. A tuple or list holds positional
arguments, perhaps followed by labels, which the signature of ``forward`` tells apart; see
:func:`call_arguments`.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.utils import network_of, unwrapped

#: Runs a model on a batch in a way of the user's own: ``forward(model, batch)``.
Forward = Callable[[nn.Module, Any], Any]

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def call_model(
    model: nn.Module,
    example: object,
    *,
    forward: Forward | None = None,
    device: torch.device | None = None,
) -> Any:
    """Run ``model`` once on ``example`` and return what it returns.

    The model gets a copy of the tensors, so that a forward that works in place changes no example.

    Args:
        model: any module.
        example: the arguments of the call; see :func:`call_arguments`.
        forward: called as ``forward(model, example)`` instead.
        device: where the tensors of ``example`` are moved first; default: they stay.

    Raises:
        ConfigError: ``example`` does not tell which arguments it holds, or it holds no tensor (a
            NumPy array, for example) and the model fails on it.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> x, labels = torch.zeros(3, 4), torch.zeros(3)
        >>> call_model(model, (x, labels)).shape
        torch.Size([3, 2])
    """
    return prepared_call(model, example, forward=forward, device=device)()


def prepared_call(
    model: nn.Module,
    example: object,
    *,
    forward: Forward | None = None,
    device: torch.device | None = None,
) -> Callable[[], Any]:
    """Return the call that :func:`call_model` makes, on a copy of the data that it works on.

    A forward may change what it is given, as ``x.sub_(mean)`` does; the example stays what it is.
    """
    if device is not None:
        example = move_to(example, device)
    if forward is not None:
        return partial(forward, model, with_copies(example))
    model = network_of(model)
    args, kwargs = with_copies(call_arguments(model, example))
    return partial(_called, model, args, kwargs, is_list=type(example) is list)


def _called(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    *,
    is_list: bool,
) -> object:
    try:
        return model(*args, **kwargs)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        arguments = [*args, *kwargs.values()]
        has_tensors = any(True for _ in tensors_in(arguments))
        is_of_types = isinstance(error, (AttributeError, TypeError))
        if arguments and not has_tensors and is_of_types:
            raise ConfigError(_no_tensor_text(model, arguments)) from error
        if is_list and has_tensors:
            raise ConfigError(
                f"{_signature_text(model)}: got a list, whose members are the arguments, and "
                f"failed on them ({type(error).__name__}: {error}); expected arguments that it "
                "takes. If the list is itself the one argument, as the images of a detector are, "
                "put it into a tuple: (images,)"
            ) from error
        raise


def _no_tensor_text(model: nn.Module, values: list[object]) -> str:
    """Return what is wrong where a model failed on arguments without a single tensor."""
    kinds = ", ".join(dict.fromkeys(type(value).__qualname__ for value in values))
    is_array = any(hasattr(value, "__array__") for value in values)
    fix = "Convert arrays with torch.from_numpy(array)" if is_array else "Pass tensors"
    return (
        f"{_signature_text(model)}: got a batch of {kinds}, without a tensor; expected one. "
        f"{fix}"
    )


def call_arguments(
    model: nn.Module, example: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that ``example`` holds for ``model``.

    Let ``forward`` require ``r`` positional arguments and accept at most ``m``. Then a tuple or
    list of ``n`` values means:

    ===================  ======================================================================
    ``n <= r, n == 1``   All values are arguments.
    ``n > m, r >= 1``    The first ``r`` values are arguments, the rest are labels and dropped.
    otherwise            An error: an optional argument and a label look the same.
    ===================  ======================================================================

    Args:
        model: any module. Wrappers of torch (``DataParallel``, compiled modules, ...) have the
            signature of the module inside.
        example: a mapping holds keyword arguments, a tuple or list positional ones; anything
            else is the one argument. A list that is itself the one argument is given as a tuple
            of one: ``([image, image],)``.

    Raises:
        ConfigError: the values of a tuple could be arguments or labels, or a mapping has a key
            that ``forward`` does not accept. The text says how to be explicit.

    Example:
        >>> call_arguments(torch.nn.ReLU(), ("x", "label"))
        (('x',), {})
        >>> call_arguments(torch.nn.Bilinear(2, 2, 2), ("x1", "x2"))
        (('x1', 'x2'), {})
    """
    if isinstance(example, Mapping):
        return (), _keywords(model, example)
    if isinstance(example, (tuple, list)):
        return _without_labels(model, tuple(example)), {}
    if example is None or isinstance(example, (str, bytes, int, float, set, frozenset)):
        raise ConfigError(
            f"{_signature_text(model)}: got a batch of type {type(example).__name__}; expected a "
            "tensor, a tuple of positional arguments or a mapping of keyword arguments. calibrate "
            "also takes forward=lambda model, batch: ..."
        )
    return (example,), {}


def _without_labels(model: nn.Module, values: tuple[object, ...]) -> tuple[object, ...]:
    parameters = _parameters(model)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    required = sum(p.default is p.empty for p in positional)
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    nothing_missing = bool(values) or not required
    if len(values) == 1 or (len(values) <= required and nothing_missing):
        return values
    if required and not open_ended and len(values) > len(positional):
        return values[:required]
    first = positional[0].name if positional else "x"
    count = "1 value" if required < 2 else f"{required} values"
    reason = ", since an optional argument and a label look the same" if values else ""
    raise ConfigError(
        f"{_signature_text(model)}: got a batch of {len(values)} values; expected {count}{reason}. "
        f"Pass a mapping such as {{{first!r}: batch[0]}}, or only the required arguments; "
        "calibrate also takes forward=lambda model, batch: model(batch[0])"
    )


def _keywords(model: nn.Module, values: Mapping[str, object]) -> dict[str, object]:
    parameters = _parameters(model)
    kinds = {p.kind for p in parameters}
    accepted = {
        p.name for p in parameters if p.kind in (*_POSITIONAL[1:], p.KEYWORD_ONLY)
    }
    unknown = [str(key) for key in values if key not in accepted]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(
            f"{_signature_text(model)}: got a mapping with {', '.join(map(repr, unknown))}; "
            f"expected keys among {', '.join(sorted(accepted)) or 'none'}. Drop the others; "
            "calibrate "
            "also takes forward=lambda model, batch: ..."
        )
    return dict(values)


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of ``forward``; if they cannot be read, ``*args`` and ``**kwargs``."""
    module = unwrapped(model)
    schema = getattr(module.forward, "schema", None)
    if isinstance(module, torch.jit.ScriptModule) and schema is not None:
        return [_of_schema(argument) for argument in schema.arguments[1:]]
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        anything = inspect.signature(lambda *args, **kwargs: None)
        return list(anything.parameters.values())


def _of_schema(argument: Any) -> inspect.Parameter:
    default = (
        argument.default_value
        if argument.has_default_value()
        else inspect.Parameter.empty
    )
    return inspect.Parameter(
        argument.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default
    )


def _signature_text(model: nn.Module) -> str:
    shown = ", ".join(str(p.replace(annotation=p.empty)) for p in _parameters(model))
    return f"{type(unwrapped(model)).__name__}.forward({shown})"


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``, also in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(move_to(part, device) for part in value)
    if type(value) is dict:
        return {key: move_to(part, device) for key, part in value.items()}
    return value


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from tensors_in(member)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for member in value:
            yield from tensors_in(member)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def floats_in(value: object) -> list[Tensor]:
    """Return the floating-point tensors in a value."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def results_in(output: object) -> list[Tensor]:
    """Return the floating-point tensors of an output.

    A number among tensors is left out: it is the loss of a model that was given labels.
    """
    floats = floats_in(output)
    return [tensor for tensor in floats if tensor.dim()] or floats


def address_of(tensor: Tensor) -> int | None:
    """Return where the memory of a tensor begins; None for one that has no memory of its own.

    Such are sparse tensors, and what a function sees that ``torch.vmap`` calls.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was overwritten; -1 for one of inference mode, which is unknown."""
    return -1 if tensor.is_inference() else tensor._version


def with_copies(value: object) -> Any:
    """Return a value with copies of its tensors, which a forward may overwrite.

    Those in tuples, lists, mappings and dataclasses are copied, each once. Objects of other classes
    stay what they are.
    """
    copies: dict[int, Tensor] = {}

    def copied(item: object) -> Any:
        if isinstance(item, Tensor):
            if id(item) not in copies:
                copies[id(item)] = item.clone()
            return copies[id(item)]
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*map(copied, item))
        if isinstance(item, (tuple, list)) and type(item).__new__ in _PLAIN_NEW:
            return type(item)(map(copied, item))
        if isinstance(item, dict) or dataclasses.is_dataclass(item):
            return _copied_fields(item, copied)
        return item

    return copied(value)


_PLAIN_NEW = (tuple.__new__, list.__new__)


def _copied_fields(item: object, copied: Callable[[Any], object]) -> object:
    """Return a dictionary, or an object of a dataclass, with copies of what it holds."""
    if isinstance(item, type) or not any(True for _ in tensors_in(item)):
        return item
    new = copy.copy(item)
    if isinstance(new, dict):
        for key in new:
            new[key] = copied(new[key])
    if dataclasses.is_dataclass(new):
        for field in dataclasses.fields(new):
            object.__setattr__(new, field.name, copied(getattr(new, field.name)))
    return new


def map_tensors(
    value: Any,
    change: Callable[[Tensor], object],
    other: Callable[[Any], object] = lambda item: item,
) -> Any:
    """Return ``value`` with each of its tensors replaced, in tuples, lists, mappings, dataclasses.

    ``other`` replaces what holds no tensors.
    """

    def inside(item: object) -> Any:
        return map_tensors(item, change, other)

    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(inside, value))
    if type(value) in (tuple, list):
        return type(value)(map(inside, value))
    if isinstance(value, Mapping):
        changed = {key: inside(member) for key, member in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value)(**{name: inside(getattr(value, name)) for name in names})
    return other(value)
