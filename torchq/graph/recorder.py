"""Recording one real forward pass, also of models that no tracer can follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.graph.calling import call_model, tensors_in
from torchq.graph.flow import LAYER_FUNCTIONS, Call, Flow, passes_bias, read_arguments
from torchq.graph.operators import METADATA
from torchq.graph.tracing import is_torch_leaf, state_kept
from torchq.utils import evaluating

__all__ = ["record"]


class _Recorder(TorchFunctionMode):
    """Notes every torch function that is called outside leaf modules.

    The hooks of :func:`record` note the leaf modules.
    """

    def __init__(
        self, owners: dict[int, tuple[str, nn.Module]], holders: dict[int, set[int]]
    ) -> None:
        super().__init__()
        self.owners, self.holders = owners, holders
        self.read: set[int] = set()
        self.calls: list[Call] = []
        self.depth = 0
        self.pending: list[tuple[int, ...]] = []
        self._producer: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is only unique while its tensor lives

    def sources(self, *values: Any) -> tuple[int, ...]:
        return tuple(self._producer[id(t)] for t in tensors_in(values) if id(t) in self._producer)

    def note_parameters(self, module: nn.Module | None, *values: Any) -> None:
        """Note the modules whose parameters a call reads, other than the called ``module``."""
        for tensor in tensors_in(values):
            holders = self.holders.get(id(tensor), set())
            if id(module) not in holders:
                self.read |= holders

    def note(
        self,
        name: str,
        module: nn.Module | None,
        inputs: tuple[int, ...],
        arguments: tuple[Any, ...],
        out: Any,
        functional: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        results = list(tensors_in(out))
        index = len(self.calls)
        self.calls.append(
            Call(
                index,
                name,
                module,
                inputs,
                arguments,
                results[0].dim() if results else None,
                functional,
                options or {},
            )
        )
        for tensor in results:
            self._producer[id(tensor)] = index
            self._alive.append(tensor)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.depth or _name(func) in METADATA:
            return func(*args, **kwargs)
        values = read_arguments(_name(func), args, kwargs)
        inputs = self.sources(values)
        out = func(*args, **kwargs)
        name, module = _name(func), None
        if func in LAYER_FUNCTIONS:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            path, layer = self.owners.get(id(weight), (name, None))
            if layer is not None and passes_bias(
                layer, args, kwargs, lambda bias: bias is layer.bias
            ):
                name, module = path, layer
        self.note_parameters(module, values)
        plain = tuple(value for value in args if not isinstance(value, Tensor))
        options = {k: value for k, value in kwargs.items() if not isinstance(value, Tensor)}
        self.note(name, module, inputs, plain, out, module is not None, options)
        return out


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property such as Tensor.shape
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def _recorder_for(model: nn.Module) -> _Recorder:
    owners: dict[int, tuple[str, nn.Module]] = {}
    holders: dict[int, set[int]] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), Tensor):
            owners[id(module.weight)] = (name, module)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            holders.setdefault(id(tensor), set()).add(id(module))
    return _Recorder(owners, holders)


def record(
    model: nn.Module, example: Any, is_leaf: Callable[[nn.Module], bool] = is_torch_leaf
) -> Flow:
    """Run ``model`` once on ``example``, in eval mode without gradients, and return its flow.

    Leaf modules are recorded by forward hooks, everything else by a torch-function mode, so plain
    functions that read a result count too. The intermediate results stay alive until the run ends.

    Args:
        model: left unchanged.
        example: the arguments of the call; see :func:`call_arguments`.
        is_leaf: which modules count as one call.
    """
    names = {id(module): name for name, module in model.named_modules()}
    recorder = _recorder_for(model)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if recorder.depth == 0:
            recorder.pending.append(recorder.sources(args, kwargs))
            recorder.note_parameters(module, args, kwargs)
        recorder.depth += 1

    def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        recorder.depth -= 1
        if recorder.depth == 0:
            recorder.note(names[id(module)], module, recorder.pending.pop(), (), out)

    with ExitStack() as stack:
        stack.enter_context(state_kept(model))
        for module in model.modules():
            takes_hooks = not isinstance(module, torch.jit.ScriptModule)
            if is_leaf(module) and module is not model and takes_hooks:
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        with recorder:
            out = call_model(model, example)
    return Flow(
        tuple(recorder.calls),
        frozenset(recorder.sources(out)),
        "recorder",
        frozenset(recorder.read),
    )
