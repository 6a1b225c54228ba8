"""The table of float modules that every check of the module contract runs over.

The contract is for quantized modules that run the float module on quantized inputs, with quantized
weights. A new row is a float module with the shapes of its inputs for one call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.contracts.recurrent_reference import recurrent_by_hand
from torchq import QuantDescriptor
from torchq.functional import fake_quantize, reduce_amax
from torchq.nn import QUANTIZED, QuantModule, TensorQuantizer, convert_

__all__ = ["CASES", "Case", "by_hand", "convert", "set_modes", "snapshot"]


@dataclass(frozen=True)
class Case:
    """A float module and one call of it.

    Attributes:
        shape: The shape of the first input.
        kwargs: Keyword arguments of the call.
        indices: For tables: the input holds integers below this number.
        others: The shapes of further inputs.
        exact: Torch's own forward on quantized tensors is the reference, bit for bit; else the
            reference adds the same products in another order.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    indices: int = 0
    others: tuple[tuple[int, ...], ...] = ()
    exact: bool = True

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the positional arguments: leaves with a gradient where they are floating point."""
        generator = torch.Generator().manual_seed(1)
        if self.indices:
            return (torch.randint(self.indices, self.shape, generator=generator),)
        shapes = (self.shape, *self.others)
        return tuple(torch.randn(s, generator=generator).requires_grad_() for s in shapes)

    def __str__(self) -> str:
        return self.name


def _shape(d: int, channels: int, size: int = 7, batch: int | None = 2) -> tuple[int, ...]:
    """Return (N, C, size, size + 1, ..) with d spatial axes."""
    return (*(() if batch is None else (batch,)), channels, *(size + i for i in range(d)))


def _convolutions() -> list[Case]:
    cases = []
    for d, cls in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        settings: dict[str, dict[str, Any]] = {
            "plain": {},
            "stride": {"stride": 2, "bias": False},
            "padding": {"padding": 1, "dilation": 2},
            "groups": {"groups": 2, "padding": tuple(range(d))},
            "depthwise": {"groups": 4},
            "same": {"padding": "same", "dilation": 2},
            "valid": {"padding": "valid"},
            "even same": {"kernel_size": 2, "padding": "same"},
        }
        settings |= {
            mode: {"padding": 2, "padding_mode": mode}
            for mode in ("zeros", "reflect", "replicate", "circular")
        }
        settings |= {
            f"{mode} same": {"padding": "same", "padding_mode": mode}
            for mode in ("reflect", "replicate", "circular")
        }
        for name, options in settings.items():
            make = _maker(cls, 4, 8, **({"kernel_size": 3} | options))
            cases.append(Case(f"{cls.__name__} {name}", make, _shape(d, 4)))
        cases.append(
            Case(
                f"{cls.__name__} unbatched",
                _maker(cls, 4, 8, 3, padding=1),
                _shape(d, 4, batch=None),
            )
        )
        cases.append(Case(f"{cls.__name__} empty", _maker(cls, 4, 8, 3), (0, *_shape(d, 4)[1:])))
    return cases


def _transposed() -> list[Case]:
    cases = []
    for d, cls in ((1, nn.ConvTranspose1d), (2, nn.ConvTranspose2d), (3, nn.ConvTranspose3d)):
        settings: dict[str, dict[str, Any]] = {
            "plain": {},
            "stride": {"stride": 2, "bias": False},
            "output_padding": {"stride": 2, "output_padding": 1, "padding": 1},
            "groups": {"groups": 2, "dilation": 2},
        }
        for name, options in settings.items():
            cases.append(
                Case(f"{cls.__name__} {name}", _maker(cls, 4, 8, 3, **options), _shape(d, 4, 4))
            )
        sizes = [9 + 2 * i + 1 for i in range(d)]
        cases.append(
            Case(
                f"{cls.__name__} output_size",
                _maker(cls, 4, 8, 3, stride=2),
                _shape(d, 4, 4),
                {"output_size": sizes},
            )
        )
        cases.append(
            Case(f"{cls.__name__} unbatched", _maker(cls, 4, 8, 3), _shape(d, 4, 4, batch=None))
        )
    return cases


def _maker(cls: type[nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: cls(*args, **kwargs)


def _matrices_and_tables() -> list[Case]:
    return [
        Case("Linear", _maker(nn.Linear, 5, 3), (4, 5)),
        Case("Linear no bias, 3-d", _maker(nn.Linear, 5, 3, bias=False), (2, 4, 5)),
        Case("Linear unbatched", _maker(nn.Linear, 5, 3), (5,)),
        Case("Linear empty", _maker(nn.Linear, 5, 3), (0, 5)),
        Case("Embedding", _maker(nn.Embedding, 10, 3), (4, 6), indices=10),
        Case(
            "Embedding padding_idx",
            _maker(nn.Embedding, 10, 3, padding_idx=2, scale_grad_by_freq=True),
            (40,),
            indices=10,
        ),
        Case("Embedding max_norm", _maker(nn.Embedding, 10, 3, max_norm=0.5), (4,), indices=10),
        Case("EmbeddingBag", _maker(nn.EmbeddingBag, 10, 3), (4, 6), indices=10),
        Case(
            "EmbeddingBag max, max_norm",
            _maker(nn.EmbeddingBag, 10, 3, mode="max", max_norm=0.5, padding_idx=1),
            (4, 6),
            indices=10,
        ),
        Case("Bilinear", _maker(nn.Bilinear, 5, 4, 3), (6, 5), others=((6, 4),)),
        Case(
            "Bilinear no bias, 3-d",
            _maker(nn.Bilinear, 5, 4, 3, bias=False),
            (2, 6, 5),
            others=((2, 6, 4),),
        ),
        Case("Identity", _maker(nn.Identity, 7, unused=True), (3, 4)),
    ]


def _activations_and_pools() -> list[Case]:
    cases = []
    for cls in (nn.ELU, nn.Hardsigmoid, nn.Hardswish, nn.LeakyReLU, nn.Mish, nn.SiLU, nn.Sigmoid):
        cases.append(Case(cls.__name__, _maker(cls), (3, 4)))
    cases.append(Case("LeakyReLU slope", _maker(nn.LeakyReLU, 0.3), (2, 3, 4)))
    for d in (1, 2, 3):
        pools = {
            "MaxPool": {"stride": 2, "padding": 1, "ceil_mode": True},
            "AvgPool": {"stride": 2, "count_include_pad": False, "padding": 1},
        }
        for kind, options in pools.items():
            cls = getattr(nn, f"{kind}{d}d")
            cases.append(Case(f"{cls.__name__} plain", _maker(cls, 3), _shape(d, 3)))
            cases.append(
                Case(f"{cls.__name__} options", _maker(cls, 3, **options), _shape(d, 3, batch=None))
            )
        cases.append(
            Case(
                f"MaxPool{d}d indices",
                _maker(getattr(nn, f"MaxPool{d}d"), 2, return_indices=True),
                _shape(d, 3),
            )
        )
        cases.append(
            Case(
                f"AdaptiveAvgPool{d}d", _maker(getattr(nn, f"AdaptiveAvgPool{d}d"), 2), _shape(d, 3)
            )
        )
        norm = getattr(nn, f"InstanceNorm{d}d")
        cases.append(Case(f"{norm.__name__} plain", _maker(norm, 3), _shape(d, 3)))
        cases.append(
            Case(
                f"{norm.__name__} affine, running",
                _maker(norm, 3, affine=True, track_running_stats=True),
                _shape(d, 3),
            )
        )
        cases.append(Case(f"{norm.__name__} unbatched", _maker(norm, 3), _shape(d, 3, batch=None)))
    return cases


def _recurrent() -> list[Case]:
    cases = []
    for cls in (nn.LSTM, nn.GRU, nn.RNN):
        settings: dict[str, dict[str, Any]] = {
            "plain": {},
            "levels, both ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
            "no bias": {"bias": False},
        }
        settings |= {"proj_size": {"proj_size": 3}} if cls is nn.LSTM else {}
        for name, options in settings.items():
            make = _maker(cls, 5, 4, **options)
            cases.append(Case(f"{cls.__name__} {name}", make, (6, 3, 5), exact=False))
    for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        state: dict[str, Any] = {} if cell is nn.LSTMCell else {"others": ((3, 4),)}
        cases.append(Case(cell.__name__, _maker(cell, 5, 4), (3, 5), exact=False, **state))
    return cases


CASES = [
    *_convolutions(),
    *_transposed(),
    *_matrices_and_tables(),
    *_activations_and_pools(),
    *_recurrent(),
]


def convert(case: Case) -> tuple[nn.Module, QuantModule]:
    """Return a float module and its quantized copy: INT8, weights per channel, one input range."""
    plain = case.make()
    module = convert_(
        copy.deepcopy(plain),
        input=QuantDescriptor(),
        weight=QuantDescriptor(axis=QUANTIZED[type(plain)].channel_axis),
    )
    assert isinstance(module, QuantModule)
    return plain, module


def set_modes(module: nn.Module, mode: str) -> None:
    """Set the mode of every quantizer."""
    for part in module.modules():
        if isinstance(part, TensorQuantizer):
            part.mode = mode


def by_hand(case: Case, plain: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """Return what the quantized module must give.

    That is the float module on quantized inputs, with a quantized weight in the place of its own.
    """
    if isinstance(plain, nn.RNNBase | nn.RNNCellBase):
        return recurrent_by_hand(plain, *inputs)
    twin = QUANTIZED[type(plain)]
    if isinstance(plain, nn.Embedding | nn.EmbeddingBag) and plain.max_norm is not None:
        plain(*inputs)  # This renormalises the table before it is quantized.
        plain.max_norm = None
    if twin.input_slots:
        inputs = tuple(fake_quantize(x, reduce_amax(x)) for x in inputs)
    if not twin.weight_slots:
        return plain(*inputs, **case.kwargs)
    assert isinstance(plain.weight, Tensor)
    granularity = QuantDescriptor(axis=QUANTIZED[type(plain)].channel_axis).granularity
    weight = fake_quantize(
        plain.weight, reduce_amax(plain.weight, granularity), granularity=granularity
    )
    return torch.func.functional_call(plain, {"weight": weight}, inputs, case.kwargs)


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Return what a conversion must leave alone.

    These are all attributes, by identity, and the entries of torch's registries.
    """
    out: dict[str, Any] = {"class": type(module)}
    for key, value in vars(module).items():
        out[key] = (
            {name: id(entry) for name, entry in value.items()}
            if isinstance(value, dict)
            else id(value)
        )
    return out
