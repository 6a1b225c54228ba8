"""Runs of one block of a model: blocks before it give the outputs that were kept of them.

The code between blocks always runs, so shortcuts around blocks, masks and keyword arguments need
no tracing. The weights of finished blocks are not read any more.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.graph import Forward, call_model, is_torch_leaf, map_tensors, record
from torchq.nn import Add, quantizing_only
from torchq.ptq.blocks import Block, CallCount, find_blocks
from torchq.ptq.layers import in_order
from torchq.utils import Pattern, device_of, kept_batches, progress_bar
from torchq.workflow import quantizers

Kind = Literal["float", "quantized"]


@contextmanager
def replaced_forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Call ``function`` in place of the forward of ``module``."""
    own = vars(module).get("forward")
    vars(module)["forward"] = function
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


_ADDITIONS = frozenset(["add", "add_", "__add__", "__radd__", "__iadd__"])


class AdditionWatch(TorchFunctionMode):
    """Reports, before it is computed, each addition of a watched tensor and one of its shape.

    It sees functions and methods of tensors; :meth:`look` is called for operands elsewhere.
    ``report`` is called with the name of the watched tensor and the other operand.
    """

    def __init__(self, report: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._report = report
        self._watched: dict[int, tuple[str, Tensor]] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        """Watch ``tensor`` from now on, until the next addition that reads it."""
        self._watched[id(tensor)] = (name, tensor)  # the tensor lives, so its id stays its own

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _ADDITIONS and not kwargs:
            self.look(args)
        return func(*args, **(kwargs or {}))

    def look(self, operands: Any) -> None:
        """Report an addition of these operands if one of them is watched."""
        if len(operands) != 2 or not all(isinstance(o, Tensor) for o in operands):
            return
        for one, other in (operands, operands[::-1]):
            if id(one) in self._watched and one.shape == other.shape and one is not other:
                name, _ = self._watched.pop(id(one))
                self._report(name, other)


def _copied(value: Any) -> Any:
    """Return a copy of an object that a block may write to, such as a cache of keys and values."""
    return value if callable(value) else copy.deepcopy(value)  # callable: a module or its method


def _copied_tensor(tensor: Tensor) -> Tensor:
    is_blank = tensor.dim() > 0 and not any(tensor.stride())
    return tensor if is_blank else tensor.clone()


def _blank(tensor: Tensor) -> Tensor:
    """Return a tensor of NaN, or of 0 for integers, that has memory for one element."""
    value = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.new_full((), value).expand(tensor.shape)


class TensorStore:
    """Copies of values, by key; what is read is a copy too, which the reader may change."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._values

    def put(self, key: Any, value: Any) -> None:
        """Keep copies of the tensors of ``value`` under ``key``."""
        self._values[key] = map_tensors(value, lambda tensor: tensor.detach().clone())

    def get(self, key: Any) -> Any:
        """Return a copy of the value under ``key``."""
        return map_tensors(self._values[key], _copied_tensor, _copied)

    def blank(self, key: Any) -> None:
        """Forget the values of the tensors under ``key``, if it is there, but not their shapes."""
        if key in self._values:
            self._values[key] = map_tensors(self._values[key], _blank)

    def drop(self, key: Any) -> None:
        """Forget ``key``, if it is there."""
        self._values.pop(key, None)


class _Stop(BaseException):
    """Ends a run of a model; no ``except Exception`` of the model's code may catch it."""


@dataclass
class Captured:
    """By path of a layer: its input before its quantizer, its output, and what is added to it."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    shortcuts: dict[str, Tensor] = field(default_factory=dict)


class Replay:
    """Runs a model up to a block, in float or quantized, on each of some batches.

    The caller puts the model in eval mode, without gradients. No batch is an error that starts with
    ``where``.
    """

    def __init__(
        self,
        where: str,
        model: nn.Module,
        batches: Iterable[Any],
        num_batches: int | None = None,
        forward: Forward | None = None,
    ) -> None:
        self.where, self.model, self.store = where, model, TensorStore()
        self.batches = kept_batches(where, batches, num_batches)
        self._forward = forward
        self._blocks: Sequence[Block] = ()
        self._forgotten: dict[int, list[int]] = {}

    def count_calls(self) -> CallCount:
        """Run the float model on the first batch and count the calls of each module."""
        calls = CallCount({}, {})

        def hook(module: nn.Module, args: Any) -> None:
            calls.counts[id(module)] = calls.counts.get(id(module), 0) + 1
            calls.order.setdefault(id(module), len(calls.order))

        with ExitStack() as stack, quantizing_only(quantizers(self.model).values()):
            for module in self.model.modules():
                stack.callback(module.register_forward_pre_hook(hook).remove)
            self._call(0)
        return calls

    def use_blocks(self, blocks: Sequence[Block]) -> None:
        """Make ``blocks`` the blocks of the model, in running order; none is finished."""
        self._blocks, self._forgotten = blocks, self._last_readers(blocks)

    def _last_readers(self, blocks: Sequence[Block]) -> dict[int, list[int]]:
        """Return block -> blocks whose outputs nothing reads once it is finished.

        The code between blocks runs each time, so what it reads is never forgotten.
        """
        numbers = {id(block.module): number for number, block in enumerate(blocks)}
        holders = {
            id(m) for m in self.model.modules() if any(id(p) in numbers for p in m.modules())
        }

        def is_leaf(module: nn.Module) -> bool:
            return id(module) in numbers or (id(module) not in holders and is_torch_leaf(module))

        with quantizing_only(quantizers(self.model).values()):
            flow = record(self.model, None, is_leaf, forward=lambda *_: self._call(0))
        found: dict[int, list[int]] = {}
        for call in flow.calls:
            number = numbers.get(id(call.module))
            readers = [numbers.get(id(r.module), len(blocks)) for r in flow.consumers(call)]
            if number is not None:
                found.setdefault(max(readers, default=number + 1), []).append(number)
        return found

    def finish(self, number: int, kind: Kind) -> None:
        """Keep the outputs of block ``number`` for the blocks after it.

        With the quantized ones the block is finished, and what only it needed is forgotten.
        """
        for index in range(len(self.batches)):
            self.run(number, index, kind)
            if kind == "quantized" and number + 1 < len(self._blocks):
                for other in self._forgotten.get(number, ()):
                    self.store.blank(("float", other, index))
                    self.store.blank(("quantized", other, index))

    def run(
        self,
        number: int,
        index: int,
        kind: Kind,
        *,
        want_inputs: Sequence[str] = (),
        want_outputs: Sequence[str] = (),
        want_shortcuts: Sequence[str] = (),
    ) -> Captured:
        """Run batch ``index`` through block ``number``, or less.

        All blocks before it are finished; ``kind`` chooses their outputs, and whether quantizers
        are on. Of the layers whose inputs, outputs or shortcuts are wanted, these are returned. If
        no outputs are, the run ends once everything is there.
        """
        found = Captured()

        def note(kept: dict[str, Tensor], name: str, tensor: Tensor) -> None:
            kept[name] = tensor.detach().clone()
            has_all = found.inputs.keys() >= set(want_inputs)
            if not want_outputs and has_all and found.shortcuts.keys() >= set(want_shortcuts):
                raise _Stop

        with ExitStack() as stack:
            stack.enter_context(self._replayed(number, index, kind))
            names = {*want_inputs, *want_outputs, *want_shortcuts}
            if names:
                additions = AdditionWatch(partial(note, found.shortcuts))
                stack.enter_context(additions)
                for module in self.model.modules():
                    if isinstance(module, Add):
                        look = module.register_forward_pre_hook(lambda _, a: additions.look(a))
                        stack.callback(look.remove)
            for name in names:
                shortcut = additions if name in want_shortcuts else None
                _hook(stack, self._blocks[number].layers[name], name, found, note, shortcut)
            with suppress(_Stop):
                self._call(index)
        return found

    def block_inputs(self, number: int, index: int, kind: Kind) -> tuple[Any, dict[str, Any]]:
        """Return the arguments that block ``number`` is called with for batch ``index``."""
        found: list[Any] = []

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            found.append(map_tensors((args, kwargs), lambda t: t.detach().clone()))
            raise _Stop

        with ExitStack() as stack:
            stack.enter_context(self._replayed(number, index, kind))
            module = self._blocks[number].module
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            with suppress(_Stop):
                self._call(index)
        args, kwargs = found[0]
        return args, kwargs

    @contextmanager
    def _replayed(self, number: int, index: int, kind: Kind) -> Iterator[None]:
        """Replace the forwards of all blocks but one, whose output is kept."""

        def keep(module: nn.Module, args: Any, out: Any) -> None:
            self.store.put((kind, number, index), out)

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise _Stop

        def kept(key: Any, *args: Any, **kwargs: Any) -> Any:
            return self.store.get(key)

        with ExitStack() as stack:
            if kind == "float":
                stack.enter_context(quantizing_only(quantizers(self.model).values()))
            for i, block in enumerate(self._blocks):
                if i == number:
                    stack.callback(block.module.register_forward_hook(keep).remove)
                    continue
                function = stop if i > number else partial(kept, (kind, i, index))
                stack.enter_context(replaced_forward(block.module, function))
            yield

    def _call(self, index: int) -> None:
        device = device_of(self.model)
        call_model(self.model, self.batches[index], forward=self._forward, device=device)


def _hook(
    stack: ExitStack,
    layer: nn.Module,
    name: str,
    found: Captured,
    note: Callable[[dict[str, Tensor], str, Tensor], None],
    shortcut: AdditionWatch | None,
) -> None:
    """Let a layer report its input and output, and watch its output for a shortcut."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        note(found.inputs, name, args[0] if args else kwargs["input"])

    def after(module: nn.Module, args: Any, out: Tensor) -> None:
        found.outputs[name] = out.detach().clone()
        if shortcut is not None:
            shortcut.watch(name, out)

    stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(layer.register_forward_hook(after).remove)


def treat_blocks(
    replay: Replay,
    found: tuple[dict[str, Any], dict[str, str]],
    patterns: Pattern | Sequence[Pattern] | None,
    treat: Callable[[int, Block], None],
    done: Collection[str],
    progress: bool,
) -> dict[str, str]:
    """Treat the blocks of a model in running order; return why other layers were left alone.

    ``found`` is what :func:`find_layers` returned, and ``treat`` is called with the number of a
    block and the block. If anything ends the work early, a warning says how many layers are
    ``done``.
    """
    layers, skipped = found
    blocks, more = find_blocks(replay.model, layers, replay.count_calls(), patterns)
    replay.use_blocks(blocks)
    numbered = list(enumerate(blocks))
    try:
        for one in progress_bar(numbered, description=replay.where, enabled=progress, unit="block"):
            treat(*one)
    except BaseException:
        if done:
            total = sum(len(block.layers) for block in blocks)
            warnings.warn(
                f"{replay.where}: ended after {len(done)} of {total} layers, which keep their new "
                "weights; the others are as before",
                stacklevel=3,
            )
        raise
    return in_order(replay.model, {**skipped, **more})
