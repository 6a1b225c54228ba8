"""The random numbers that torch and Python draw, kept so that a run can draw them once more."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """Where the generators of torch, of Python and of NumPy stand.

    Attributes:
        cpu: the state of torch's generator for the CPU.
        cuda: the states of those of its CUDA devices; empty where none is in use.
        python: the state of the module ``random``.
        numpy: the state of NumPy's global generator; None where nothing has imported it.
    """

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: Any
    numpy: Any = None

    @classmethod
    def now(cls) -> "RandomState":
        """Return where the generators stand."""
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        cuda = tuple(torch.cuda.get_rng_state_all()) if in_use else ()
        numbers = _numpy_random()
        numpy = None if numbers is None else numbers.get_state()
        return cls(torch.get_rng_state(), cuda, random.getstate(), numpy)

    def restore(self) -> None:
        """Let the generators stand here again."""
        torch.set_rng_state(self.cpu)
        for device, state in enumerate(self.cuda):
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy_random().set_state(self.numpy)


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


@contextmanager
def random_kept() -> Iterator[None]:
    """Let random numbers go on at the end as if the block had drawn none."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()


@contextmanager
def random_seeded(seed: int) -> Iterator[None]:
    """Let torch draw from a seed inside the block; at the end random numbers go on as before.

    A device that nothing has used yet is left alone: ``torch.manual_seed`` would seed it for good.
    """
    with random_kept():
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        yield


@contextmanager
def repeated_draws(
    *tensors: Tensor, generator: torch.Generator | None = None
) -> Iterator[Callable[[], None]]:
    """Yield a function after which torch draws the same random numbers as before it.

    Args:
        *tensors: what a function computes with: the generators of their devices are rewound.
        generator: one that the function is given.
    """
    generators = [torch.default_generator] if generator is None else [generator]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        generators.append(torch.cuda.default_generators[device.index])
    states = [one.get_state() for one in generators]

    def rewind() -> None:
        for one, state in zip(generators, states, strict=True):
            one.set_state(state)

    yield rewind
