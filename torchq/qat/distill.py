"""Distillation: the quantized model learns from its float twin, without a change to its code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchq.errors import ConfigError
from torchq.graph import tensors_in
from torchq.swap import restore_
from torchq.utils import copy_module, network_of


def float_twin(model: nn.Module) -> nn.Module:
    """Return a float copy of a quantized model: in eval mode, without gradients.

    Parameters of ``model`` that are frozen are shared with the copy, the others are copied. Their
    values are those of now, so make the twin before training.

    Args:
        model: left unchanged.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model)
        >>> torchq.workflow.is_quantized(float_twin(model))
        False
    """
    model = network_of(model)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    twin = copy_module(model, sharing=frozen)
    restore_(twin)
    return twin.eval().requires_grad_(False)


def logit_loss(
    student: Tensor, teacher: Tensor, temperature: float = 1.0, dim: int = -1
) -> Tensor:
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
    if student.shape != teacher.shape:
        raise ConfigError(
            f"distillation: got shapes {tuple(student.shape)} of the student and "
            f"{tuple(teacher.shape)} of the teacher; expected the same"
        )
    _check_temperature(temperature)
    logs = F.log_softmax(student.float() / temperature, dim)
    targets = F.log_softmax(teacher.detach().float() / temperature, dim)
    divergence = F.kl_div(logs, targets, reduction="none", log_target=True).sum(dim)
    return divergence.mean() * temperature**2


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ConfigError(
            f"distillation: got temperature={temperature!r}; expected a number > 0"
        )


def first_logits(output: object) -> Tensor:
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
        temperature: of :func:`logit_loss`.
        dim: the dimension of the classes in the logits.
        logits: takes the logits out of what the model returns.

    Raises:
        ConfigError: the temperature is not positive.

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
        temperature: float = 1.0,
        dim: int = -1,
        logits: Callable[[Any], Tensor] = first_logits,
    ) -> None:
        _check_temperature(temperature)
        self.model = network_of(model)
        self.teacher = float_twin(model) if teacher is None else teacher
        self.temperature, self.dim = temperature, dim
        self._logits = logits
        self._handle: RemovableHandle | None = None
        self._call: tuple[tuple[object, ...], dict[str, object], object] | None = None

    def __enter__(self) -> Distillation:
        """Watch the calls of the model."""
        self._handle = self.model.register_forward_hook(
            self._note_call, with_kwargs=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching, and forget the last call."""
        if self._handle is not None:
            self._handle.remove()
        self._call = None

    def _note_call(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        output: object,
    ) -> None:
        self._call = args, kwargs, output

    def loss(self) -> Tensor:
        """Return the loss of the logits of the model's last call.

        The twin runs once, in eval mode and without gradients.

        Raises:
            ConfigError: there was no call since the last loss, or outside the block.
        """
        if self._call is None:
            raise ConfigError(
                "Distillation.loss: got no call of the model; expected one before each loss, "
                "inside the block. If it was compiled before, give what torch.compile returned"
            )
        args, kwargs, output = self._call
        self._call = None
        with torch.no_grad():
            expected = self.teacher(*args, **kwargs)
        return logit_loss(
            self._logits(output), self._logits(expected), self.temperature, self.dim
        )
