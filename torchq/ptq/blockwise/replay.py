"""Runs of one block of a model: blocks before it give the outputs that were kept of them.

The code between blocks always runs, so shortcuts around blocks, masks and keyword arguments need
no tracing. The weights of finished blocks are not read any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchq.graph import Forward, call_model
from torchq.nn import Add
from torchq.ptq.blockwise.additions import AdditionWatch
from torchq.ptq.blockwise.blocks import Block, CallCount
from torchq.ptq.blockwise.forwards import replaced_forward
from torchq.ptq.blockwise.output_watch import OutputWatch
from torchq.ptq.blockwise.storage import TensorStore, map_tensors
from torchq.ptq.modes import quantizers_off
from torchq.utils import device_of, kept_batches

__all__ = ["Captured", "Replay", "RunOptions"]

Kind = Literal["float", "quantized"]


@dataclass(frozen=True)
class RunOptions:
    """How an algorithm runs a model on its batches.

    Args:
        num_batches: the number of batches to read; None reads all.
        forward: called as ``forward(model, batch)`` in place of the model.
        group: processes of torch.distributed that work together, each with its own batches.
        memory_limit: bytes of activations that are kept in memory; the rest goes to temporary
            files.
    """

    num_batches: int | None = None
    forward: Forward | None = None
    group: dist.ProcessGroup | None = None
    memory_limit: int = 2 << 30


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

    Args:
        model: run in the modes that it has; the caller puts it in eval mode, without gradients.
        batches: each holds the arguments of one call.
        options: how many batches to read, and how to run them.
        store: where the outputs of blocks are kept.
        where: the start of error texts.

    Raises:
        CalibrationError: there is no batch.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        options: RunOptions,
        store: TensorStore,
        where: str,
    ) -> None:
        self.model, self.store = model, store
        self.batches = kept_batches(where, batches, options.num_batches)
        self._forward = options.forward
        self._blocks: Sequence[Block] = ()
        self._additions = [m for m in model.modules() if isinstance(m, Add)]

    def count_calls(self) -> CallCount:
        """Run the float model on the first batch and count the calls of each module."""
        calls = self._calls = CallCount({}, {}, {})
        tensors = _Numbers()

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.counts[id(module)] = calls.counts.get(id(module), 0) + 1
            calls.order.setdefault(id(module), len(calls.order))
            calls.inputs.setdefault(
                id(module), tensors.of(args[0] if args else kwargs.get("input"))
            )

        with ExitStack() as stack, quantizers_off(self.model):
            for module in self.model.modules():
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            self._call(0)
        return calls

    def use_blocks(self, blocks: Sequence[Block]) -> None:
        """Make ``blocks`` the blocks of the model, in running order; none is finished."""
        self._blocks = blocks

    def layers_by_input(self, number: int) -> list[list[str]]:
        """Return the layers of a block in running order, successive ones of one input together.

        Layers that read the same tensor, such as the projections to query, key and value, do not
        depend on each other.
        """
        found: list[list[str]] = []
        last = None
        for name, layer in self._blocks[number].layers.items():
            source = self._calls.inputs[id(layer)]
            if source == last:
                found[-1].append(name)
            else:
                found.append([name])
            last = source
        return found

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

        Args:
            number: of the block; all blocks before it are finished.
            index: of the batch.
            kind: the outputs of the blocks before it, and whether quantizers are on.
            want_inputs: layers whose inputs are returned. If anything is wanted, the run ends
                once it is there, and the output of the block is kept only if it got that far.
            want_outputs: layers whose outputs are returned.
            want_shortcuts: layers of which is returned what is added to their outputs.
            watch: finds out which outputs of earlier blocks are not needed any more.
        """
        found = Captured()
        some = bool(want_inputs or want_outputs or want_shortcuts)
        is_lookup = some and not want_outputs

        def check() -> None:
            if (
                is_lookup
                and found.inputs.keys() >= set(want_inputs)
                and found.shortcuts.keys() >= set(want_shortcuts)
            ):
                raise _Stop

        with ExitStack() as stack:
            stack.enter_context(quantizers_off(self.model) if kind == "float" else nullcontext())
            stack.enter_context(self._replayed(number, index, kind, watch))
            if some:
                additions = AdditionWatch(lambda name, other: _note(found, name, other, check))
                stack.enter_context(additions)
                for module in self._additions:
                    stack.callback(additions.hook(module).remove)
                layers = self._blocks[number].layers
                for name in {*want_inputs, *want_outputs, *want_shortcuts}:
                    self._hook(stack, layers[name], name, found, additions, want_shortcuts, check)
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
            stack.enter_context(quantizers_off(self.model) if kind == "float" else nullcontext())
            stack.enter_context(self._replayed(number, index, kind))
            module = self._blocks[number].module
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            with suppress(_Stop):
                self._call(index)
        args, kwargs = found[0]
        return args, kwargs

    def _hook(
        self,
        stack: ExitStack,
        layer: nn.Module,
        name: str,
        found: Captured,
        watch: AdditionWatch,
        want_shortcuts: Sequence[str],
        check: Callable[[], None],
    ) -> None:
        """Let a layer report its input and output, and watch its output."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = args[0] if args else kwargs["input"]
            found.inputs[name] = x.detach().clone()
            check()

        def after(module: nn.Module, args: Any, out: Tensor) -> None:
            found.outputs[name] = out.detach().clone()
            if name in want_shortcuts:
                watch.watch(name, out)

        stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(layer.register_forward_hook(after).remove)

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


class _Numbers:
    """A number for each tensor, also after it is gone and another one has its id."""

    def __init__(self) -> None:
        self._count = 0
        self._alive: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, value: Any) -> int:
        """Return the number of a tensor; anything else gets a new one each time."""
        number = self._alive.get(value) if isinstance(value, Tensor) else None
        if number is None:
            number = self._count = self._count + 1
            if isinstance(value, Tensor):
                self._alive[value] = number
        return number


def _note(found: Captured, name: str, other: Tensor, check: Callable[[], None]) -> None:
    found.shortcuts[name] = other.detach().clone()
    check()
