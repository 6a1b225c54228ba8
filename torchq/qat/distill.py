"""Distillation: the quantized model learns from its float twin, without a change to its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchq.errors import ConfigError
from torchq.graph import tensors_in
from torchq.swap import restore_
from torchq.utils import Pattern, check_pattern, copy_module, matches, pattern_text

__all__ = ["Distillation", "feature_loss", "first_logits", "float_twin", "logit_loss"]


def float_twin(model: nn.Module) -> nn.Module:
    """Return a float copy of a quantized model: in eval mode, without gradients.

    Parameters of ``model`` that are frozen are shared with the copy, the others are copied. Their
    values are those of now, so make the twin before training.

    Args:
        model: left unchanged.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model)
        >>> torchq.is_quantized(float_twin(model))
        False
    """
    frozen = [p for p in model.parameters() if not p.requires_grad]
    twin = copy_module(model, sharing=frozen)
    restore_(twin)
    return twin.eval().requires_grad_(False)


def logit_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, dim: int = -1) -> Tensor:
    """Return the divergence of two predictions, 0 where they are equal.

    It is the Kullback-Leibler divergence of the softened classes, times ``temperature**2``,
    averaged over all predictions.

    Args:
        student: logits, floating point, any shape.
        teacher: logits of the same shape; no gradient goes to them.
        temperature: what both logits are divided by, > 0.
        dim: the dimension of the classes.

    Raises:
        ConfigError: the shapes differ, or the temperature is not positive.

    Reference: Hinton et al., Distilling the Knowledge in a Neural Network (2015), section 2.
    """
    _check_shapes(student, teacher)
    _check_temperature(temperature)
    logs = F.log_softmax(student.float() / temperature, dim)
    targets = F.log_softmax(teacher.detach().float() / temperature, dim)
    divergence = F.kl_div(logs, targets, reduction="none", log_target=True).sum(dim)
    return divergence.mean() * temperature**2


def _check_shapes(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise ConfigError(
            f"distillation: got shapes {tuple(student.shape)} of the student and "
            f"{tuple(teacher.shape)} of the teacher; expected the same"
        )


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ConfigError(f"distillation: got temperature={temperature!r}; expected a number > 0")


def feature_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the squared difference of two features relative to the size of the teacher's.

    Args:
        student: floating point, any shape.
        teacher: of the same shape; no gradient goes to it.

    Raises:
        ConfigError: the shapes differ.
    """
    _check_shapes(student, teacher)
    target = teacher.detach().float()
    return F.mse_loss(student.float(), target) / target.square().mean().clamp_min(1e-12)


def first_logits(output: Any) -> Tensor:
    """Return the attribute ``logits`` of ``output`` if it has one, else its first tensor."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else next(tensors_in(output))


class Distillation:
    """The difference of a quantized model to its float twin, as a loss; a context manager.

    Inside its block, each call of the model notes its arguments and results, and :meth:`loss` runs
    the twin on the same arguments. The model is called by whatever code trains it.

    Args:
        model: the quantized model that is trained. If ``torch.compile`` is used, give what it
            returned: hooks of a model that is compiled already are not always seen.
        teacher: the model to learn from; default :func:`float_twin` of the model now.
        layers: patterns of modules whose results are compared too, by :func:`feature_loss`; the
            same paths must lead to modules of the teacher.
        temperature: of :func:`logit_loss`.
        dim: the dimension of the classes in the logits.
        logits: takes the logits out of what the model returns. None compares the selected layers
            alone.

    Raises:
        ConfigError: a pattern selects no module, the teacher lacks a path, or the temperature is
            not positive.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
        >>> _ = torchq.quantize_(model, torchq.recipes.w4a4(first_last=None))
        >>> with Distillation(model, temperature=2.0) as distillation:
        ...     y = model(torch.randn(8, 4))
        ...     distillation.loss().backward()
        >>> model[0].weight.grad is not None
        True
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None = None,
        *,
        layers: Sequence[Pattern] | Pattern = (),
        temperature: float = 1.0,
        dim: int = -1,
        logits: Callable[[Any], Tensor] | None = first_logits,
    ) -> None:
        _check_temperature(temperature)
        self.model = model
        self.teacher = float_twin(model) if teacher is None else teacher
        self.layers = _select(model, self.teacher, layers)
        self.temperature, self.dim = temperature, dim
        self._logits = logits
        if self._logits is None and not self.layers:
            raise ConfigError("Distillation: got logits=None without layers; expected one of them")
        self._handles: list[RemovableHandle] = []
        self._call: tuple[tuple[Any, ...], dict[str, Any], Any] | None = None
        self._features: dict[str, Tensor] = {}

    def __enter__(self) -> Distillation:
        """Watch the calls of the model."""
        for name in self.layers:
            module = self.model.get_submodule(name)
            self._handles.append(module.register_forward_hook(_noting(self._features, name)))
        self._handles.append(self.model.register_forward_hook(self._note_call, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching, and forget the last call."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._call = None
        self._features.clear()

    def _note_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self._call = args, kwargs, output

    def loss(self) -> Tensor:
        """Return the loss of the model's last call: of its logits, plus the mean of its layers.

        The twin runs once, in eval mode and without gradients.

        Raises:
            ConfigError: there was no call since the last loss, or outside the block; or a layer
                was not called.
        """
        if self._call is None:
            raise ConfigError(
                "Distillation.loss: got no call of the model; expected one before each loss, "
                "inside the block. If it was compiled before, give what torch.compile returned"
            )
        (args, kwargs, output), self._call = self._call, None
        features, found = dict(self._features), dict[str, Tensor]()
        self._features.clear()
        expected = self._run_teacher(args, kwargs, found)
        unseen = [name for name in self.layers if name not in features or name not in found]
        if unseen:
            raise ConfigError(
                f"{unseen[0]}: got no call of this layer; expected one in each call of the model "
                "and of the teacher. Layers of compiled models are seen if the block begins before "
                "their first call"
            )
        losses = [feature_loss(features[name], found[name]) for name in self.layers]
        total = torch.stack(losses).mean() if losses else 0.0
        if self._logits is not None:
            student, teacher = self._logits(output), self._logits(expected)
            total = total + logit_loss(student, teacher, self.temperature, self.dim)
        assert isinstance(total, Tensor)
        return total

    def _run_teacher(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], found: dict[str, Tensor]
    ) -> Any:
        """Return the result of the teacher, and fill in ``found`` with its layers' results."""
        handles = [
            self.teacher.get_submodule(name).register_forward_hook(_noting(found, name))
            for name in self.layers
        ]
        try:
            with torch.no_grad():
                return self.teacher(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()


def _noting(found: dict[str, Tensor], name: str) -> Callable[..., None]:
    """Return a hook that keeps the first tensor that a module returns."""

    def note(module: nn.Module, args: Any, output: Any) -> None:
        found[name] = next(tensors_in(output))

    return note


def _select(
    model: nn.Module, teacher: nn.Module, layers: Sequence[Pattern] | Pattern
) -> tuple[str, ...]:
    """Return the paths that the patterns select; each exists in the teacher too."""
    if isinstance(layers, (str, type)) or callable(layers):
        layers = (layers,)
    known = dict(teacher.named_modules())
    chosen: list[str] = []
    for pattern in map(check_pattern, layers):
        found = [n for n, module in model.named_modules() if n and matches(pattern, (n,), module)]
        if not found:
            raise ConfigError(
                f"Distillation: pattern {pattern_text(pattern)!r} selects no module; expected "
                f"one of {', '.join(list(known)[1:9])}, ..."
            )
        chosen += found
    missing = [name for name in chosen if name not in known]
    if missing:
        raise ConfigError(
            f"{missing[0]}: got a layer that the teacher does not have; expected the same paths "
            "in both. Narrow the patterns"
        )
    return tuple(dict.fromkeys(chosen))
