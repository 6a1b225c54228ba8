"""Runs of one block of a model: blocks before it give the outputs that were kept of them.

The code between blocks always runs, so shortcuts around blocks, masks and keyword arguments need
no tracing. The weights of finished blocks are not read any more.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from torchq.graph import Forward, call_model, tensors_in
from torchq.nn import Add, quantizing_only
from torchq.ptq.blocks import Block, CallCount, find_blocks
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


# Functions and attributes of a tensor that do not read its values.
_SHAPES = frozenset(["shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda"])


class OutputWatch(TorchFunctionMode):
    """Watches one run of a model up to a block, and finds what no later run needs.

    The code between blocks is the same in every run. So an output that no function and no module
    outside the running block read, and that is gone when the next block begins, is not needed once
    the running block is finished. Reading nothing but the shape of an output does not count.
    """

    def __init__(self, blocks: Sequence[Block], number: int) -> None:
        super().__init__()
        self._blocks, self._number = blocks, number
        self._owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._kept: set[int] = set()
        self._read: set[int] = set()
        self._is_inside = False
        #: Numbers of the blocks before this one whose outputs are not needed any more.
        self.unneeded: set[int] = set()

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Watch the functions and the calls of the modules of ``model``."""
        blocks = [block.module for block in self._blocks]
        inside = {part for block in blocks for part in block.modules()}
        running = blocks[self._number]
        with self, ExitStack() as stack:
            stack.callback(running.register_forward_pre_hook(self._begin).remove)
            stack.callback(running.register_forward_hook(self._end).remove)
            for module in model.modules():
                if inside.isdisjoint(module.modules()):
                    handle = module.register_forward_pre_hook(self._look, with_kwargs=True)
                    stack.callback(handle.remove)
            yield

    def kept(self, number: int, output: Any) -> None:
        """Watch the output of a finished block, which is about to be returned."""
        self._kept.add(number)
        for tensor in tensors_in(output):
            self._owners[tensor] = number

    def next_begins(self) -> None:
        """Decide, when the block after the running one is called."""
        self.unneeded = self._kept - self._read - set(self._owners.values())

    def _begin(self, *_: Any) -> None:
        self._is_inside = True

    def _end(self, *_: Any) -> None:
        self._is_inside = False

    def _look(self, module: nn.Module, *values: Any) -> None:
        self._read |= {self._owners[t] for t in tensors_in(values) if t in self._owners}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if not self._is_inside and name not in _SHAPES:
            self._read |= {self._owners[t] for t in tensors_in((args, kwargs)) if t in self._owners}
        return func(*args, **(kwargs or {}))


def map_tensors(
    value: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda item: item
) -> Any:
    """Return ``value`` with each of its tensors replaced, in tuples, lists, mappings, dataclasses.

    ``other`` replaces what holds no tensors.

    >>> map_tensors((torch.ones(2), [3]), lambda t: t.sum().item())
    (2.0, [3])
    """

    def inside(item: Any) -> Any:
        return map_tensors(item, change, other)

    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(inside, value))
    if type(value) in (tuple, list):
        return type(value)(map(inside, value))
    if isinstance(value, Mapping):
        changed = {key: inside(item) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value)(**{name: inside(getattr(value, name)) for name in names})
    return other(value)


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


class Captured:
    """The tensors of one run of one block.

    Attributes:
        inputs: path of a layer -> its input, before its quantizer.
        outputs: path of a layer -> its output.
        shortcuts: path of a layer -> what is added to its output.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.shortcuts: dict[str, Tensor] = {}


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
        self._blocks = blocks

    def finish(self, number: int, kind: Kind) -> None:
        """Keep the outputs of block ``number`` for the blocks after it.

        With the quantized ones the block is finished, and what only it needed is forgotten.
        """
        for index in range(len(self.batches)):
            watch = OutputWatch(self._blocks, number)
            self.run(number, index, kind, watch=watch)
            if kind == "quantized":
                for other in watch.unneeded:
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
        watch: OutputWatch | None = None,
    ) -> Captured:
        """Run batch ``index`` through block ``number`` and to the next block, or less.

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
            stack.enter_context(self._replayed(number, index, kind, watch))
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
    def _replayed(
        self, number: int, index: int, kind: Kind, watch: OutputWatch | None = None
    ) -> Iterator[None]:
        """Replace the forwards of all blocks but one, whose output is kept."""

        def keep(module: nn.Module, args: Any, out: Any) -> None:
            self.store.put((kind, number, index), out)

        def stop(*args: Any, **kwargs: Any) -> Any:
            if watch is not None:
                watch.next_begins()
            raise _Stop

        with ExitStack() as stack:
            if kind == "float":
                stack.enter_context(quantizing_only(quantizers(self.model).values()))
            if watch is not None:
                stack.enter_context(watch.hooked(self.model))
            for i, block in enumerate(self._blocks):
                if i == number:
                    stack.callback(block.module.register_forward_hook(keep).remove)
                    continue
                function = stop if i > number else partial(self._kept, (kind, i, index), watch)
                stack.enter_context(replaced_forward(block.module, function))
            yield

    def _kept(self, key: Any, watch: OutputWatch | None, *args: Any, **kwargs: Any) -> Any:
        """Return what the store holds, whatever the arguments are."""
        value = self.store.get(key)
        if watch is not None:
            watch.kept(key[1], value)
        return value

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
    skipped = {**skipped, **more}
    return {name: skipped[name] for name in dict(replay.model.named_modules()) if name in skipped}
