"""The residual stream of a transformer: what writes to it, and what reads it through norms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchq.errors import QuantizationError
from torchq.graph import Call, Flow

__all__ = ["Stream", "find_stream", "is_rms_norm"]

_ADDITIONS = frozenset(["add", "add_", "iadd"])
# Calls that leave a vector as it is, but for one factor or the dtype.
_PASSING = (nn.Identity, nn.Dropout)
_PASSING_FUNCTIONS = frozenset(
    [
        *("dropout", "to", "float", "half", "bfloat16", "type_as", "contiguous", "clone"),
        *("detach", "mul", "div", "getitem", "index_select"),
    ]
)
_FIX = "Only pre-norm transformers with RMSNorm can be rotated"


@dataclass
class Stream:
    """The modules around a residual stream.

    Attributes:
        size: its channels.
        embeddings: path -> table whose rows are written.
        writers: path -> Linear layer whose output is added.
        norms: path -> RMSNorm that reads it.
        readers: path of a norm -> path and layer of each Linear layer that reads the norm.
    """

    size: int
    embeddings: dict[str, Any] = field(default_factory=dict)
    writers: dict[str, Any] = field(default_factory=dict)
    norms: dict[str, Any] = field(default_factory=dict)
    readers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def layers(self) -> list[Any]:
        """Return the Linear layers that read the norms."""
        return [layer for group in self.readers.values() for layer in group.values()]

    def modules(self) -> list[Any]:
        """Return all modules that a rotation changes."""
        own = (*self.embeddings.values(), *self.writers.values(), *self.norms.values())
        return [*own, *self.layers()]


def is_rms_norm(module: nn.Module | None) -> bool:
    """Return True for RMSNorm with a weight, torch's or another library's."""
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("RMSNorm") and weight is not None and weight.dim() == 1


def find_stream(flow: Flow) -> Stream:
    """Return the residual stream that begins at the embedding.

    Args:
        flow: of one run in which embeddings, norms and Linear layers are leaves.

    Raises:
        QuantizationError: the model is built in another way; the text names the call.
    """
    tables = [call for call in flow.calls if isinstance(call.module, nn.Embedding)]
    if not tables:
        raise QuantizationError(f"hadamard_: got no embedding; expected a language model. {_FIX}")
    table: Any = tables[0].module
    stream = Stream(table.embedding_dim)
    todo, seen = [tables[0]], set[int]()
    while todo:
        call = todo.pop()
        if call.index in seen:
            continue
        seen.add(call.index)
        todo += _sources(flow, call, stream)
        if call.index in flow.outputs:
            raise QuantizationError(
                f"hadamard_: {call.name} is an output of the model, which a rotation would change; "
                "expected a model with its head"
            )
        for reader in flow.consumers(call):
            if is_rms_norm(reader.module):
                _add_norm(flow, reader, stream)
            else:
                _check_carries(reader)
                todo.append(reader)
    order = {call.name: call.index for call in flow.calls}
    for found in (stream.embeddings, stream.writers, stream.norms, stream.readers):
        ordered = sorted(found.items(), key=lambda item: order[item[0]])
        found.clear()
        found.update(ordered)
    return stream


def _sources(flow: Flow, call: Call, stream: Stream) -> list[Call]:
    """Return the calls of the stream that a call of the stream reads; note what writes to it."""
    if isinstance(call.module, nn.Embedding):
        _check_once(flow, call)
        if call.module.max_norm is not None:
            raise QuantizationError(
                f"hadamard_: {call.name}: got an embedding with max_norm, which a rotation would "
                "change; expected none"
            )
        stream.embeddings[call.name] = call.module
        return []
    if isinstance(call.module, nn.Linear):
        _check_once(flow, call)
        stream.writers[call.name] = call.module
        return []
    _check_carries(call)
    if _is_addition(call) and len(call.inputs) != 2:
        raise QuantizationError(
            f"hadamard_: {call.name}: got a constant or parameter that is added to the residual "
            f"stream; expected the outputs of layers. {_FIX}"
        )
    return [flow.calls[index] for index in call.inputs]


def _is_addition(call: Call) -> bool:
    name = type(call.module).__name__ if call.module is not None else call.name
    return name.strip("_").lower() in _ADDITIONS


def _check_carries(call: Call) -> None:
    """Raise an error unless a call adds, or passes a vector as it is."""
    if _is_addition(call) or isinstance(call.module, _PASSING):
        return
    is_passing = call.module is None and call.name.strip("_") in _PASSING_FUNCTIONS
    if is_passing and len(call.inputs) == 1:
        return
    what = f" ({type(call.module).__name__})" if call.module is not None else ""
    raise QuantizationError(
        f"hadamard_: {call.name}{what} works on the residual stream; expected RMSNorm, additions, "
        f"embeddings and Linear layers. {_FIX}"
    )


def _add_norm(flow: Flow, call: Call, stream: Stream) -> None:
    """Note a norm of the stream and its readers."""
    norm: Any = call.module
    _check_once(flow, call)
    stream.norms[call.name] = norm
    readers = stream.readers.setdefault(call.name, {})
    for reader in _through_casts(flow, call):
        if not isinstance(reader.module, nn.Linear):
            raise QuantizationError(
                f"hadamard_: {call.name} is read by {reader.name}; expected Linear layers alone. "
                f"{_FIX}"
            )
        _check_once(flow, reader)
        readers[reader.name] = reader.module


def _through_casts(flow: Flow, call: Call) -> list[Call]:
    """Return the readers of a norm, beyond calls that pass a vector as it is."""
    found: list[Call] = []
    for reader in flow.consumers(call):
        is_passing = reader.module is None and reader.name.strip("_") in _PASSING_FUNCTIONS
        passes = is_passing or isinstance(reader.module, _PASSING)
        found += _through_casts(flow, reader) if passes else [reader]
    return found


def _check_once(flow: Flow, call: Call) -> None:
    """Raise an error unless the module of a call runs once and only its calls read its weight."""
    assert call.module is not None
    if len(flow.calls_of(call.module)) > 1:
        reason = "it runs several times"
    elif call.functional or (id(call.module) in flow.read and not _is_table(call)):
        reason = "its weight is read by a function"
    else:
        return
    raise QuantizationError(f"hadamard_: {call.name} cannot be rotated: {reason}. {_FIX}")


def _is_table(call: Call) -> bool:
    """Return True for an embedding, whose table the head may share."""
    return isinstance(call.module, nn.Embedding)
