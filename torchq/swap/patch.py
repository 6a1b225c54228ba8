"""Quantizing modules while somebody else's code builds a model."""

from __future__ import annotations

from types import TracebackType

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from torchq import recipes
from torchq.config import QuantConfig
from torchq.errors import ConfigError
from torchq.nn import QuantModule, TensorQuantizer, revert_
from torchq.swap.apply import carry_out_
from torchq.swap.decisions import Decision, by_rules, decide
from torchq.utils import modules_with_names

__all__ = ["Patch", "patch"]


class Patch:
    """A running :func:`patch`; a context manager, or call :meth:`restore`."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self._converted: dict[int, Decision] = {}
        self._busy = False
        self._handle = register_module_module_registration_hook(self._registered)

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Decide about ``child`` again each time it gets a longer name; undo what a rule on the longer name skips."""
        if child is None or self._busy or isinstance(parent, (TensorQuantizer, QuantModule)):
            return
        self._busy = True  # conversion registers quantizers, which calls this hook again
        try:
            self._redo(_Named(name, child))
        finally:
            self._busy = False

    def _redo(self, holder: nn.Module) -> None:
        for names, module in list(modules_with_names(holder)):
            if isinstance(module, QuantModule) and (before := self._converted.get(id(module))):
                after = by_rules(names, module, self.config)
                if (after.reason, after.input, after.weight) != (
                    before.reason,
                    before.input,
                    before.weight,
                ):
                    revert_(module)
        for decision in decide(holder, self.config):
            if not decision.reason:
                carry_out_(decision)
                self._converted[id(decision.module)] = (
                    decision  # which holds the module, so its id stays its own
                )

    def restore(self) -> None:
        """Stop patching. Models that were built stay quantized; later ones are float."""
        self._handle.remove()
        self._converted.clear()

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()


class _Named(nn.Module):
    """Gives ``child`` the name that it is being registered under."""

    def __init__(self, name: str, child: nn.Module) -> None:
        super().__init__()
        self._modules[name] = child


def patch(config: QuantConfig | None = None) -> Patch:
    """Quantize every module from its registration in a parent on, whoever builds it.

    Uses torch's module registration hook: classes that a script imported directly (``from torch.nn import Conv2d``) are
    caught too, and ``torch.nn`` is untouched. Glob patterns see the name as far as it is known; they are tried again each
    time a larger part of the model is put together. A model that is a single layer has no parent and is not caught. Patches
    nest; what one has quantized the others leave alone.

    Args:
        config: the rules; default :func:`torchq.recipes.int8`.

    Returns:
        a context manager, also with a method ``restore()``.

    Example:
        >>> with torchq.patch():
        ...     model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> type(model[0]).__name__, type(torch.nn.Sequential(torch.nn.Linear(2, 2))[0]).__name__
        ('QuantLinear', 'Linear')
    """
    config = config or recipes.int8()
    for rule in config.rules:
        if rule.position is not None:
            raise ConfigError(
                f"patch: rule {rule}: needs the whole model, which patch never sees; expected no "
                "rule with a position. Call quantize_, or recipes.integer(..., first_last=None)"
            )
    return Patch(config)
