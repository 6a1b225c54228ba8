"""Whether a converted model computes, with every quantizer off, what it computed before.

Both run once on an example, in eval mode, from the same state of the random numbers, and with one
way of computing attention. Results, the arguments afterwards and the state that the forward keeps
have to be equal bit for bit. Where they differ, further runs tell which module is the first whose
results do although its inputs do not, and whether the model repeats itself at all.
"""

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import QuantizationError
from torchq.graph import call_arguments, with_copies
from torchq.nn import TensorQuantizer, switched_off
from torchq.nn.convert import float_class_of
from torchq.nn.optional_buffers import OPTIONAL
from torchq.swap.plan import Plan
from torchq.utils import (
    dense_numbers,
    random_kept,
    same_numbers,
    unfused_attention,
    untouched,
)

#: What a plan says about the comparison: it was left out, or nothing was found that differs.
OFF, EQUAL = "off", "equal"
#: The start of what it says where nothing can be compared.
NOT_REPEATABLE = "not repeatable"
_DEEPEST = 4


@contextmanager
def computing_in_float(model: nn.Module) -> Iterator[None]:
    """Let a model compute with all quantizers off, in eval mode; give its state back at the end."""
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    with switched_off(quantizers), untouched(model):
        yield


class ResultsDiffer(Exception):
    """The converted model computes something else; the text says what."""


@dataclass(frozen=True)
class Outcome:
    """What a run of a float model gave.

    Attributes:
        values: everything that it returned, its arguments afterwards, and the state that it keeps.
        paths: the modules of the model.
    """

    values: Sequence[Any]
    paths: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, example: object) -> "Outcome":
        """Run a model once in float."""
        paths = frozenset(
            name for name, _ in model.named_modules(remove_duplicate=False)
        )
        return cls(_values_of_run(model, example, paths), paths)

    def check(self, model: nn.Module, example: object) -> None:
        """Raise ResultsDiffer unless the model, converted meanwhile, gives the same."""
        try:
            values = _values_of_run(model, example, self.paths)
        except Exception as error:  # whatever the code of the model raises
            raise ResultsDiffer(
                f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from error
        problem = difference(self.values, values)
        if problem:
            raise ResultsDiffer(problem)


def _values_of_run(
    model: nn.Module, example: object, paths: frozenset[str]
) -> list[object]:
    with random_kept(), computing_in_float(model), unfused_attention():
        args, kwargs = with_copies(call_arguments(model, example))
        result = model(*args, **kwargs)
        state = [_state_of(m) for name, m in model.named_modules() if name in paths]
        return [_kept(leaf) for leaf in leaves((result, args, kwargs, state))]


def _state_of(module: nn.Module) -> list[object]:
    """Return the buffers and tensors among the attributes that a forward may have changed."""
    if isinstance(module, TensorQuantizer):
        return []
    names = [n for n in vars(module) if not n.startswith(("_", "torchq"))]
    attributes = [
        v for n in names for v in leaves(vars(module)[n]) if isinstance(v, Tensor)
    ]
    buffers = [b for n, b in module.named_buffers(recurse=False) if n not in OPTIONAL]
    return [*buffers, *attributes]


def _kept(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def leaves(value: object, depth: int = 0) -> Iterator[Any]:
    """Yield tensors, numbers and strings in nested containers and plain objects, in order."""
    if isinstance(value, (Tensor, str, int, float, complex, type(None))):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from leaves(member, depth)
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from leaves(member, depth)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), depth)
    elif (
        depth < _DEEPEST
        and not isinstance(value, (type, nn.Module))
        and not callable(value)
    ):
        for member in getattr(value, "__dict__", {}).values():
            yield from leaves(member, depth + 1)


def difference(before: Sequence[object], after: Sequence[object]) -> str:
    """Return in what two runs differ; "" where they are equal."""
    if len(before) != len(after):
        return f"returns {len(after)} values, not {len(before)}"
    largest = 0.0
    is_equal = True
    for old, new in zip(before, after, strict=True):
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            same_kind = isinstance(old, Tensor) == isinstance(new, Tensor)
            if not same_kind or not (old == new or (old != old and new != new)):
                return f"returns {new!r}, not {old!r}"
        elif old.shape != new.shape or old.dtype != new.dtype:
            return f"returns {_form(new)}, not {_form(old)}"
        elif not same_numbers(old, new):
            is_equal = False
            gap = (
                (dense_numbers(new).double() - dense_numbers(old).double())
                .abs()
                .nan_to_num(nan=torch.inf)
            )
            largest = max(largest, float(gap.max()))
    return "" if is_equal else f"is off by up to {largest:.1e}"


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


# --- which module differs -----------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module: hashes of what it was given, and of what it gave."""

    path: str
    inputs: str
    results: str


def _calls_of(
    model: nn.Module, example: object, paths: frozenset[str]
) -> list[ModuleCall]:
    """Return the calls of modules in a float run, in the order of their ends."""
    calls: list[ModuleCall] = []
    opened: list[tuple[str, str]] = []

    def enter(path: str, module: nn.Module, args: object, kwargs: object) -> None:
        opened.append((path, _hash((args, kwargs))))

    def leave(module: nn.Module, args: object, kwargs: object, result: object) -> None:
        calls.append(ModuleCall(*opened.pop(), _hash((result, args, kwargs))))

    with ExitStack() as stack:
        stack.enter_context(random_kept())
        stack.enter_context(computing_in_float(model))
        stack.enter_context(unfused_attention())
        for path, module in model.named_modules():
            if path in paths and not isinstance(module, torch.jit.ScriptModule):
                before = module.register_forward_pre_hook(
                    partial(enter, path), with_kwargs=True
                )
                after = module.register_forward_hook(leave, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        args, kwargs = with_copies(call_arguments(model, example))
        try:
            model(*args, **kwargs)
        except Exception as error:  # the calls that have not ended tell where
            calls += [ModuleCall(*call, repr(error)) for call in reversed(opened)]
    return calls


def _hash(values: object) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves(values):
        if isinstance(leaf, Tensor):
            digest.update(_form(leaf).encode())
            if not leaf.is_meta:
                numbers = dense_numbers(leaf.detach()).contiguous().reshape(-1).cpu()
                digest.update(bytes(numbers.view(torch.uint8).numpy()))
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def first_difference(before: Sequence[ModuleCall], after: Sequence[ModuleCall]) -> str:
    """Return the path of the first module that gives other results for equal inputs."""
    by_path: dict[str, list[ModuleCall]] = defaultdict(list)
    for call in after:
        by_path[call.path].append(call)
    numbers: dict[str, int] = defaultdict(int)
    differing = []
    for call in before:
        number = numbers[call.path]
        numbers[call.path] += 1
        others = by_path[call.path][number : number + 1]
        if not others or others[0].results != call.results:
            if others and others[0].inputs == call.inputs:
                return call.path
            differing.append(call.path)
    return differing[0] if differing else ""


def unrepeatable_module(
    model: nn.Module, example: object, outcome: Outcome
) -> str | None:
    """Return the path of the first module that differs from itself; None where none does."""
    again = Outcome.of(model, example)
    if not difference(outcome.values, again.values):
        return None
    runs = [_calls_of(model, example, outcome.paths) for _ in range(2)]
    return first_difference(*runs)


def calls_of(
    model: nn.Module, example: object, outcome: Outcome
) -> Sequence[ModuleCall]:
    """Return the calls of the modules of a model in a float run, converted or not."""
    return _calls_of(model, example, outcome.paths)


def refusal(path: str, problem: str, plan: Plan, model: nn.Module) -> QuantizationError:
    """Return the error that names the module, what was rewritten in it, and the way out."""
    rows = [d for d in plan.replaced if path in d.names]
    entry = plan.operators.get(path)
    start = f"{path}." if path else ""
    children = (
        [] if entry is None else [f"{start}{child}" for child in entry.sites.values()]
    )
    parts = [
        d for d in plan.replaced if d.name.startswith(start) and d.name not in children
    ]
    changed = [f"{d.class_name} is quantized" for d in rows if not d.is_container]
    changed += [f"{child} stands for an operator" for child in children]
    excluded = [*(d.name for d in rows if d.name and not d.is_container), *children]
    if not changed:
        excluded = [d.name for d in parts if not d.is_container][:_SHOWN]
        changed = [f"{name} has another class" for name in excluded]
    shown = "; ".join(changed[:_SHOWN]) or "its class"
    return QuantizationError(
        f"quantize_: {path or '(root)'}: got a {_class_name(model, path)} that, converted and with "
        f"every quantizer off, {problem}; expected what it computed before. Changed in it: {shown}."
        f" Pass exclude={excluded!r}, or check=False to convert it all the same"
    )


def cannot_run(model: nn.Module, error: Exception) -> QuantizationError:
    """Return the error for a forward that raises as soon as modules have other classes."""
    return QuantizationError(
        f"{float_class_of(model).__name__}: once converted, its forward raises "
        f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; expected results as before. "
        "Leave out the layers that its code looks at, exclude=['NAME'], or pass no example, which "
        "changes fewer classes"
    )


_SHOWN = 4


def _class_name(model: nn.Module, path: str) -> str:
    return float_class_of(model.get_submodule(path)).__name__
