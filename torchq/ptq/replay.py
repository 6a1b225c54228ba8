"""The blocks of a model, one after the other: earlier ones give the outputs that were kept of them.

The code between blocks always runs, so shortcuts around blocks, masks and keyword arguments need
no tracing. The weights of finished blocks are not read any more.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.errors import ConfigError
from torchq.graph import Forward, call_model, is_torch_leaf, map_tensors, record
from torchq.nn import Add, switched_off
from torchq.utils import (
    Pattern,
    check_pattern,
    child_path,
    device_of,
    kept_batches,
    matches,
    pattern_text,
    progress_bar,
    state_kept,
    watching,
)
from torchq.workflow import quantizers
from torchq.workflow.layer_changes import first_input, in_order

Kind = Literal["float", "quantized"]
Patterns = Pattern | Sequence[Pattern] | None
#: Id of a module -> the places of its calls among all calls of one run.
Calls = dict[int, list[int]]

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_ADDITIONS = frozenset(["add", "add_", "__add__", "__radd__", "__iadd__"])


@dataclass(frozen=True)
class Block:
    """A module that is treated as a whole; ``layers`` are those to treat, in running order."""

    name: str
    module: nn.Module
    layers: dict[str, Any]


def find_blocks(
    model: nn.Module, layers: dict[str, Any], calls: Calls, patterns: Patterns = None
) -> tuple[list[Block], dict[str, str]]:
    """Return the blocks of ``model`` in running order, and the layers that no block holds.

    A block is the largest module that runs once and is no chain. A chain is the model itself, a
    list of modules inside a chain, or a module around a list of which two children or more hold
    two layers each, such as the encoder around the blocks of a transformer. A layer outside all
    others is a block of its own. ``patterns`` name the blocks in place of the structure.
    """
    modules_by_name: dict[str, nn.Module] = {}
    once = {n: m for n, m in layers.items() if len(calls.get(id(m), ())) == 1}
    if patterns is None:
        _split(model, "", layers, calls, modules_by_name, inside_chain=True)
    else:
        modules_by_name = _chosen(model, layers, patterns)
        modules_by_name |= {
            n: m for n, m in once.items() if not _is_below(n, modules_by_name)
        }
    blocks = []
    for name, module in modules_by_name.items():
        block_layers = [(n, m) for n, m in once.items() if _is_below(n, [name])]
        if block_layers:
            blocks.append(
                Block(
                    name,
                    module,
                    dict(sorted(block_layers, key=lambda i: calls[id(i[1])])),
                )
            )
    blocks.sort(key=lambda block: calls[id(next(iter(block.layers.values())))])
    treated = {path for block in blocks for path in block.layers}
    skipped = {
        path: "it or a module around it runs several times"
        if id(layer) in calls
        else "no batch reached it"
        for path, layer in layers.items()
        if path not in treated
    }
    return blocks, skipped


def _is_below(path: str, names: Iterable[str]) -> bool:
    """Return True if a path is one of ``names`` or lies below one; the root has no name."""
    return any(
        not name or path == name or path.startswith(f"{name}.") for name in names
    )


def _count(name: str, layers: Iterable[str]) -> int:
    return sum(_is_below(path, [name]) for path in layers)


def _chosen(
    model: nn.Module, layers: dict[str, object], patterns: Pattern | Sequence[Pattern]
) -> dict[str, nn.Module]:
    """Return the outermost modules with layers that the patterns select."""
    single = isinstance(patterns, (str, type)) or callable(patterns)
    listed: Sequence[Pattern] = [patterns] if single else list(patterns)  # type: ignore
    chosen: dict[str, nn.Module] = {}
    for pattern in listed:
        check_pattern(pattern)
        hits = {
            name: module
            for name, module in model.named_modules()
            if name and matches(pattern, [name], module) and _count(name, layers)
        }
        if not hits:
            raise ConfigError(
                f"block: got {pattern_text(pattern)}, which matches no module with layers to "
                f"treat; expected a pattern such as {next(iter(layers), 'layer1.*')!r}"
            )
        chosen |= hits
    return {
        name: m
        for name, m in chosen.items()
        if not _is_below(name, chosen.keys() - {name})
    }


def _split(
    module: nn.Module,
    name: str,
    layers: dict[str, object],
    calls: Calls,
    found: dict[str, nn.Module],
    *,
    inside_chain: bool,
) -> None:
    """Add the blocks at and below ``module`` to ``found``."""
    if not _count(name, layers):
        return
    runs_once = len(calls.get(id(module), ())) == 1
    is_chain = not name or (inside_chain and isinstance(module, _LISTS))
    is_chain = is_chain or _holds_list_of_blocks(module, name, layers)
    if name in layers or (runs_once and not is_chain):
        if runs_once:
            found[name] = module
        return
    for child_name, child in module.named_children():
        path = child_path(name, child_name)
        _split(child, path, layers, calls, found, inside_chain=is_chain)


def _holds_list_of_blocks(
    module: nn.Module, name: str, layers: dict[str, object]
) -> bool:
    """Return True if a list below ``module`` has two children or more with two layers each."""
    for path, part in module.named_modules(prefix=name):
        if isinstance(part, _LISTS):
            counts = [
                _count(child_path(path, c), layers) for c, _ in part.named_children()
            ]
            if sum(count > 1 for count in counts) > 1:
                return True
    return False


@contextmanager
def replaced_forward(
    module: nn.Module, function: Callable[..., object]
) -> Iterator[None]:
    """Call ``function`` in place of the forward of ``module``."""
    own_forward = vars(module).get("forward")
    vars(module)["forward"] = function
    try:
        yield
    finally:
        if own_forward is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own_forward


class _AdditionWatch(TorchFunctionMode):
    """Reports, before it is computed, each addition of a watched tensor and one of its shape.

    It sees functions and methods of tensors; :meth:`look` is called for operands elsewhere.
    ``report`` is called with the name of the watched tensor and the other operand.
    """

    def __init__(self, report: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._report = report
        #: By id, which stays the tensor's own as long as the tensor lives.
        self.watched: dict[int, tuple[str, Tensor]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if getattr(func, "__name__", "") in _ADDITIONS and not kwargs:
            self.look(args)
        return func(*args, **(kwargs or {}))

    def look(self, operands: Any, *_: object) -> None:
        """Report an addition of these operands if one of them is watched."""
        if len(operands) != 2 or not all(isinstance(o, Tensor) for o in operands):
            return
        for one, other in (operands, operands[::-1]):
            if (
                id(one) in self.watched
                and one.shape == other.shape
                and one is not other
            ):
                self._report(self.watched.pop(id(one))[0], other)


def copied(value: object) -> Any:
    """Return a copy of what was kept of a run, for a block that may write to it.

    Also caches and the like are copied, but no functions.
    """
    return map_tensors(
        value, _cloned, lambda item: item if callable(item) else copy.deepcopy(item)
    )


def _cloned(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor; one without values, of :func:`_blank`, stays what it is."""
    is_blank = tensor.dim() > 0 and not any(tensor.stride())
    return tensor if is_blank else tensor.detach().clone()


def _blank(tensor: Tensor) -> Tensor:
    """Return a tensor of NaN, or of 0 for integers, that has memory for one element."""
    value = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.new_full((), value).expand(tensor.shape)


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
        self.where, self.model = where, model
        self.batches = kept_batches(where, batches, num_batches)
        self._forward = forward
        self._blocks: Sequence[Block] = ()
        self._forgotten: dict[int, list[int]] = {}
        #: (kind, number of a block, index of a batch) -> the output of the block.
        self.outputs: dict[tuple[Kind, int, int], Any] = {}

    def treat(
        self,
        found: tuple[dict[str, object], dict[str, str]],
        patterns: Patterns,
        treat: Callable[[int, Block], None],
        done: Collection[str],
        progress: bool,
    ) -> dict[str, str]:
        """Treat the blocks in running order; return why other layers were left alone.

        ``found`` is what :func:`find_layers` returned, and ``treat`` is called with the number of a
        block and the block. If anything ends the work early, a warning says how many layers are
        ``done``.
        """
        layers, skipped = found
        blocks, more = find_blocks(self.model, layers, self.count_calls(), patterns)
        self.use_blocks(blocks)
        shown = progress_bar(
            blocks, description=self.where, enabled=progress, unit="block"
        )
        try:
            for number, block in enumerate(shown):
                treat(number, block)
        except BaseException:
            if done:
                total = sum(len(block.layers) for block in blocks)
                warnings.warn(
                    f"{self.where}: ended after {len(done)} of {total} layers, which keep their "
                    "new weights; the others are as before",
                    stacklevel=3,
                )
            raise
        return in_order(self.model, {**skipped, **more})

    def count_calls(self) -> Calls:
        """Run the float model on the first batch and return the calls of each module."""
        calls: Calls = {}
        places = count()

        def note(module: nn.Module, *_: object) -> None:
            calls.setdefault(id(module), []).append(next(places))

        watched = [(module, partial(note, module)) for module in self.model.modules()]
        with self._floating(), watching(watched, before=True):
            self._call(0)
        return calls

    def _floating(self) -> Any:
        return switched_off(quantizers(self.model).values())

    def use_blocks(self, blocks: Sequence[Block]) -> None:
        """Make ``blocks`` the blocks of the model, in running order; none is finished."""
        last_readers = self._last_readers(blocks)
        self._blocks = blocks
        self._forgotten = last_readers

    def _last_readers(self, blocks: Sequence[Block]) -> dict[int, list[int]]:
        """Return block -> blocks whose outputs nothing reads once it is finished.

        The code between blocks runs each time, so what it reads is never forgotten.
        """
        numbers = {id(block.module): number for number, block in enumerate(blocks)}
        holders = {
            id(m)
            for m in self.model.modules()
            if any(id(p) in numbers for p in m.modules())
        }

        def is_leaf(module: nn.Module) -> bool:
            return id(module) in numbers or (
                id(module) not in holders and is_torch_leaf(module)
            )

        with self._floating():
            flow = record(self.model, None, is_leaf, forward=lambda *_: self._call(0))
        forgotten: dict[int, list[int]] = {}
        for call in flow.calls:
            number = numbers.get(id(call.module))
            readers = [
                numbers.get(id(r.module), len(blocks)) for r in flow.consumers(call)
            ]
            if number is not None:
                forgotten.setdefault(max(readers, default=number + 1), []).append(
                    number
                )
        return forgotten

    def finish(self, number: int, kind: Kind) -> None:
        """Keep the outputs of block ``number`` for the blocks after it.

        With the quantized ones the block is finished, and what only it needed is forgotten.
        """
        for index in range(len(self.batches)):
            self.run(number, index, kind)
            if kind == "quantized" and number + 1 < len(self._blocks):
                for other in self._forgotten.get(number, ()):
                    self._forget(other, index)

    def _forget(self, number: int, index: int) -> None:
        """Forget the values of the outputs of a block, but not their shapes."""
        for key in self.outputs.keys() & {
            ("float", number, index),
            ("quantized", number, index),
        }:
            self.outputs[key] = map_tensors(self.outputs[key], _blank)

    def run(
        self,
        number: int,
        index: int,
        kind: Kind,
        names: Sequence[str] = (),
        *,
        until: Literal["inputs", "shortcuts"] | None = None,
    ) -> Captured:
        """Run batch ``index`` through block ``number`` and return what was seen of some layers.

        All blocks before it are finished; ``kind`` chooses their outputs, and whether quantizers
        are on. The run ends once the first input or shortcut is there, if ``until`` says so.
        """
        captured = Captured()
        layers = {name: self._blocks[number].layers[name] for name in names}

        def note(what: str, name: str, tensor: Tensor) -> None:
            getattr(captured, what)[name] = tensor.detach().clone()
            if what == until:
                raise _Stop

        def enter(name: str, args: Sequence[object], kwargs: Any, _: None) -> None:
            note("inputs", name, first_input(args, kwargs))

        def leave(name: str, args: object, kwargs: object, out: Tensor) -> None:
            note("outputs", name, out)
            additions.watched[id(out)] = name, out

        additions = _AdditionWatch(partial(note, "shortcuts"))
        adding = [
            (m, additions.look) for m in self.model.modules() if isinstance(m, Add)
        ]
        with (
            self._replayed(number, index, kind),
            additions if names else nullcontext(),
            watching(adding if names else (), before=True),
            watching(
                ((m, partial(enter, name)) for name, m in layers.items()), before=True
            ),
            watching((m, partial(leave, name)) for name, m in layers.items()),
            suppress(_Stop),
        ):
            self._call(index)
        return captured

    def arguments(self, number: int, index: int) -> tuple[Any, dict[str, Any]]:
        """Return what block ``number`` of the quantized model is called with."""
        arguments: list[Any] = []

        def enter(args: object, kwargs: object, _: None) -> None:
            arguments.append(map_tensors((args, kwargs), _cloned))
            raise _Stop

        watched = [(self._blocks[number].module, enter)]
        with (
            self._replayed(number, index, "quantized"),
            watching(watched, before=True),
            suppress(_Stop),
        ):
            self._call(index)
        args, kwargs = arguments[0]
        return args, kwargs

    @contextmanager
    def _replayed(self, number: int, index: int, kind: Kind) -> Iterator[None]:
        """Replace the forwards of all blocks but one, whose output is kept."""

        def keep(args: object, kwargs: object, out: object) -> None:
            self.outputs[kind, number, index] = map_tensors(out, _cloned)

        def stop(*args: object, **kwargs: object) -> object:
            raise _Stop

        def kept(other: int, *args: object, **kwargs: object) -> object:
            return copied(self.outputs[kind, other, index])

        with ExitStack() as stack:
            if kind == "float":
                stack.enter_context(self._floating())
            stack.enter_context(watching([(self._blocks[number].module, keep)]))
            for other, block in enumerate(self._blocks):
                if other != number:
                    function = stop if other > number else partial(kept, other)
                    stack.enter_context(replaced_forward(block.module, function))
            yield

    def _call(self, index: int) -> None:
        device = device_of(self.model)
        with state_kept(self.model):
            call_model(
                self.model, self.batches[index], forward=self._forward, device=device
            )
