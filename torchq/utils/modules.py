"""Helpers on :class:`torch.nn.Module`: its device, paths, wrappers and copies, temporary modes."""

import collections
import copy
import functools
import inspect
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from torchq.utils.tensors import same_numbers
from torchq.utils.written_parameters import written_parameters


def is_torchs_own(module: nn.Module) -> bool:
    """Return True for a layer of torch, whose operators torch knows."""
    return type(module).__module__.startswith("torch.nn.")


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of the first parameter or buffer of ``model``; None where it has none."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in eval mode; at the end give every module its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def plain_attention() -> Iterator[None]:
    """Run attention operator by operator: the fused kernel has no ONNX form and no quantizers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Let attention be computed in one way alone, whatever torch would choose for an input."""
    with plain_attention(), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def counting_operations(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the operations in the block so far, as torch counts them.

    Attention counts where it is computed in one way alone: see :func:`unfused_attention`.
    """
    # The module imports Triton, which `import torchq` must not do.
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    counter = FlopCounterMode(display=False)
    # torch's counter asks for the gradient functions of what modules are given. Views of
    # parameters that are made without gradients have none, and that is an error of it.
    with without_gradients(model), counter:
        yield counter.get_total_flops


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Let the parameters of a model need no gradients inside the ``with`` block.

    Those that were made in inference mode stay as they are: nothing takes gradients of them. So do
    copies of the parameters of scripted modules, which other tensors were computed for.
    """
    learned = [
        p
        for p in model.parameters()
        if p.requires_grad and p.is_leaf and not p.is_inference()
    ]
    for parameter in learned:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad = True


def set_submodule(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put ``new`` at the dotted ``path`` below ``model``, which cannot be ``model`` itself."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)


def twin_of(module: nn.Module) -> nn.Module:
    """Return an object with the attributes, hooks and children of ``module``, but its own lists."""
    twin = copy.copy(module)
    vars(twin).update(
        {
            name: copy.copy(value)
            for name, value in vars(module).items()
            if isinstance(value, dict)
        }
    )
    return twin


def network_of(model: nn.Module) -> nn.Module:
    """Return the network of an object that trains it, such as Ultralytics' ``YOLO``.

    The method ``train`` of such a module takes the settings of a training by name, in place of a
    mode, so that ``model.eval()`` would start one. Its network is its attribute ``model``. Any
    other module is returned.
    """
    inside = getattr(model, "model", None) if isinstance(model, nn.Module) else None
    if not isinstance(inside, nn.Module) or type(model).train is nn.Module.train:
        return model
    parameters = inspect.signature(type(model).train).parameters
    kinds = {p.kind for p in parameters.values()}
    # One that passes any arguments on takes a mode among them.
    takes_settings = inspect.Parameter.VAR_KEYWORD in kinds
    passes_on = inspect.Parameter.VAR_POSITIONAL in kinds
    is_trainer = takes_settings and not passes_on and "mode" not in parameters
    return inside if is_trainer else model


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers of torch, also of one around another.

    ``DataParallel``, ``DistributedDataParallel``, ``AveragedModel``, and what ``torch.compile`` and
    ``checkpoint_wrapper`` return, have one child and a ``forward(*args, **kwargs)``.
    """
    children = list(model.children())
    is_torchs = type(model).__module__.startswith("torch.") and not isinstance(
        model, fx.GraphModule
    )
    if len(children) != 1 or not is_torchs:
        return model
    try:
        kinds = {p.kind for p in inspect.signature(model.forward).parameters.values()}
    except (TypeError, ValueError):  # scripted
        return model
    is_wrapper = kinds == {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    return unwrapped(children[0]) if is_wrapper else model


def deployed_part(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the path and the first module that ``deploy`` made in a model; None without one."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith(("torchq.lowering.", "torchq.runtimes.")):
            return name or "(root)", module
    return None


M = TypeVar("M", bound=nn.Module)


def copy_module(module: M, *, sharing: Iterable[object] = ()) -> M:
    """Return a deep copy of ``module`` that shares Python modules, locks, computed tensors."""
    memo = {id(shared): shared for shared in sharing}
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:  # an attribute may fail to copy in any way it likes
        return copy.deepcopy(module, {**_what_cannot_be_copied(module), **memo})


def _what_cannot_be_copied(module: nn.Module) -> dict[int, object]:
    """Return the objects below attributes of ``module`` that ``copy.deepcopy`` refuses, by id."""
    tree = {id(part): part for part in module.modules()}
    shared: dict[int, Any] = {}
    for part in tree.values():
        # Traced modules change while they are copied.
        for name, value in list(vars(part).items()):
            if name != "_modules":
                _collect(value, tree, shared, set())
    return shared


def _collect(
    value: object, tree: dict[int, Any], shared: dict[int, Any], seen: set[int]
) -> None:
    """Add to ``shared`` the smallest parts of ``value`` that cannot be copied."""
    if id(value) in tree or id(value) in seen:
        return
    seen.add(id(value))
    try:
        copy.deepcopy(value, {**tree, **shared})
    except Exception:  # see copy_module
        count_before = len(shared)
        for part in _parts(value):
            _collect(part, tree, shared, seen)
        if len(shared) == count_before:
            shared[id(value)] = value


def _parts(value: object) -> Iterator[object]:
    """Yield what ``value`` refers to, where ``copy.deepcopy`` would follow it."""
    if isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif not isinstance(value, types.ModuleType):
        yield from getattr(value, "__dict__", {}).values()


#: The most objects that are looked into for what a forward may have stored in them.
_MOST_OBJECTS = 10_000


class _Held:
    """What the attributes of modules hold: containers with their items, tensors, generators.

    Objects of classes of the user's own are looked into as dictionaries are.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes = [(module, dict(vars(module))) for module in modules]
        #: Those that hold something, with a copy, and the empty ones, which most are: each object
        #: that is made here brings the next round of the garbage collector nearer.
        self._filled: dict[int, tuple[Any, Any]] = {}
        self._empty: dict[int, Any] = {}
        self._generators: list[tuple[Callable[[Any], object], Any]] = []
        self.tensors: dict[int, Tensor] = {}
        self._nested = 0
        # The containers of modules themselves, such as their children, come first and are never
        # too many; only what is nested in them has a limit.
        for _, values in self._attributes:
            for value in values.values():
                if isinstance(value, (dict, list, set, collections.deque)):
                    self._copy(value)
        for _, values in self._attributes:
            for name, value in values.items():
                if name in _OF_MODULES:
                    continue
                if id(value) in self._filled:
                    self._note_items(value)
                elif id(value) not in self._empty:
                    self._note(value)

    def _copy(self, container: Any) -> None:
        if container:
            self._filled[id(container)] = container, container.copy()
        else:
            self._empty[id(container)] = container

    def _note(self, value: object) -> None:
        """Enter a value, if it is a container or a tensor, and what is in it."""
        if type(value) in _NO_STATE:
            return
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                self.tensors[id(value)] = value
        elif isinstance(value, _CONTAINERS):
            self._note_container(value)
        elif isinstance(value, torch.Generator):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._generators.append((value.setstate, value.getstate()))
        elif hasattr(value, "bit_generator"):  # one of NumPy's
            numbers = value.bit_generator
            self._generators.append((partial(setattr, numbers, "state"), numbers.state))
        else:
            cls: type[Any] = type(value)
            may_hold = _may_hold_results(cls)  # type: ignore[arg-type]
            if may_hold and hasattr(value, "__dict__"):
                self._note_container(vars(value))

    def _note_container(self, value: Any) -> None:
        is_noted = id(value) in self._filled or id(value) in self._empty
        if is_noted or self._nested > _MOST_OBJECTS:
            return
        self._nested += 1
        if not isinstance(value, tuple):
            self._copy(value)
        self._note_items(value)

    def _note_items(self, value: Any) -> None:
        for member in value.values() if isinstance(value, dict) else value:
            self._note(member)

    def restore(self) -> None:
        """Give modules their attributes, and containers in them, back."""
        for module, values in self._attributes:
            vars(module).clear()
            vars(module).update(values)
        for value in self._empty.values():
            if value:
                value.clear()
        for value, content in self._filled.values():
            value.clear()
            (value.update if isinstance(value, (dict, set)) else value.extend)(content)
        for set_state, state in self._generators:
            set_state(state)


#: What every module has, and in which no forward keeps results: children have attributes of their
#: own, parameters have no state.
_OF_MODULES = frozenset(["_modules", "_parameters"])
_NO_STATE = frozenset([bool, int, float, complex, str, bytes, type(None), torch.dtype])
_CONTAINERS = (dict, list, tuple, set, collections.deque)


@functools.cache
def _may_hold_results(cls: type[nn.Module]) -> bool:
    """Return True for the class of plain objects that a forward may store results in."""
    is_plain = not issubclass(cls, (nn.Module, type))
    return is_plain and cls.__module__.partition(".")[0] not in _LIBRARIES


#: Where classes come from that hold no results; those of the user's own are told by the rest.
_LIBRARIES = frozenset(["torch", "torchq", "numpy", *sys.stdlib_module_names]) - {
    *("__main__", "argparse", "types")  # plain namespaces
}


@contextmanager
def undone_on_error(
    *parts: nn.Module,
    written: Iterable[Tensor | None] = (),
    but: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> Iterator[Callable[[], None]]:
    """Give modules their parts, attributes and tensors back where the body raises, ``but`` these.

    Of numbers in place, those of the tensors that will be ``written`` are undone. Yields the
    function that does so.
    """
    modules = list(dict.fromkeys(module for part in parts for module in part.modules()))
    held = _Held(modules)
    data = [(p, p.data) for module in modules for p in module.parameters(recurse=False)]
    numbers = [(t, t.detach().clone()) for t in written if t is not None]

    def restore() -> None:
        held.restore()
        with torch.no_grad():
            for parameter, tensor in data:
                parameter.data = tensor
            for tensor, number in numbers:
                tensor.copy_(number)

    try:
        yield restore
    except but:
        raise
    except BaseException:
        restore()
        raise


@contextmanager
def state_kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Give every module of ``model`` its attributes, containers and buffers back at the end.

    Yields the function that does so, for a block that runs the model several times.

    A forward may store results in its module, and while it is traced these are proxies: the first
    call of torchvision's RoI pooling notes scales, timm's LeViT fills a dictionary of biases. This
    is the one helper for state: whatever runs a model for a while leaves with it what is in
    attributes, in the containers, objects and tensors there, and in buffers. Parameters get their
    tensors back, and their numbers where the source of a class shows that it writes into these
    (:func:`torchq.utils.written_parameters.written_parameters`).
    """
    held = _Held(model.modules())
    kept = (*held.tensors.values(), *written_parameters(model))
    materialized = (t for t in kept if not is_lazy(t))
    dense = [
        t for t in materialized if t.layout is torch.strided and not t.is_quantized
    ]
    contents = [
        (tensor, tensor.detach().clone()) for tensor in dense if not tensor.is_meta
    ]
    # Sparse tensors have no address to compare.
    plain = (
        p for p in model.parameters() if not is_lazy(p) and p.layout is torch.strided
    )
    data = [(p, p.data) for p in plain]

    def restore() -> None:
        held.restore()
        with torch.no_grad():
            for parameter, original_data in data:
                if parameter.data_ptr() != original_data.data_ptr():
                    parameter.data = original_data
            for tensor, content in contents:
                if not same_numbers(tensor, content):
                    tensor.copy_(content)

    try:
        yield restore
    finally:
        restore()


@contextmanager
def watching(
    watched: Iterable[tuple[nn.Module, Callable[[Any, Any, Any], object]]],
    *,
    before: bool = False,
) -> Iterator[None]:
    """Call a function with arguments, keyword arguments and result of each call of its module.

    What it returns is the result in place of the module's, unless it is None. With ``before`` it is
    called before the module, with None as the result.
    """
    with ExitStack() as stack:
        for module, see in watched:

            def enter(_: object, args: Any, kwargs: Any, see: Any = see) -> None:
                see(args, kwargs, None)

            def leave(
                _: object, args: Any, kwargs: Any, out: Any, see: Any = see
            ) -> Any:
                return see(args, kwargs, out)

            handle = (
                module.register_forward_pre_hook(enter, with_kwargs=True)
                if before
                else module.register_forward_hook(leave, with_kwargs=True)
            )
            stack.callback(handle.remove)
        yield


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Let ``model`` run in eval mode without gradients; leave it as it was at the end."""
    with torch.no_grad(), evaluating(model), state_kept(model):
        yield


def calls_are_recorded() -> bool:
    """Return True while ``torch.compile``, ``torch.export`` or ``torch.jit.trace`` record calls."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


@contextmanager
def _ignore_tracer_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


def constant_while_tracing() -> AbstractContextManager[None]:
    """Return a context in which shapes and ranges may be read as Python values.

    They are constants of the traced model there, and reading them gives no TracerWarning.
    """
    return _ignore_tracer_warnings() if torch.jit.is_tracing() else nullcontext()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what ``torch.compile`` made as it is written: it follows hooks for minutes."""
    # Nothing is compiled yet, and it takes long to load.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
