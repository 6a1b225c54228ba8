"""The table of float modules that every check of the module contract runs over.

The contract is for quantized modules that run the float module on quantized inputs, with quantized
weights. A new row is a float module with the shapes of its inputs for one call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.contracts.recurrent_reference import recurrent_by_hand
from torchq import QuantDescriptor
from torchq.functional import fake_quantize, reduce_amax
from torchq.nn import QUANTIZED, QuantModule, TensorQuantizer, convert_
from torchq.nn.optional_buffers import OPTIONAL

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
        return tuple(
            torch.randn(s, generator=generator).requires_grad_() for s in shapes
        )

    def __str__(self) -> str:
        return self.name


def _shape(
    d: int, channels: int, size: int = 7, batch: int | None = 2
) -> tuple[int, ...]:
    """Return (N, C, size, size + 1, ..) with d spatial axes."""
    return (
        *(() if batch is None else (batch,)),
        channels,
        *(size + i for i in range(d)),
    )


def _case(
    setting: str,
    shape: tuple[int, ...],
    cls: type[nn.Module],
    *args: Any,
    call: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """Return the case of a class, made with further arguments and called with ``call``."""
    name = f"{cls.__name__} {setting}".strip()
    return Case(
        name,
        lambda: cls(*args, **options),
        shape,
        call or {},
    )


def _convolutions() -> Iterator[Case]:
    for d, cls in (
        (1, nn.Conv1d),
        (2, nn.Conv2d),
        (3, nn.Conv3d),
    ):
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
        for mode in ("zeros", "reflect", "replicate", "circular"):
            settings[mode] = {"padding": 2, "padding_mode": mode}
            settings[f"{mode} same"] = {"padding": "same", "padding_mode": mode}
        for name, options in settings.items():
            yield _case(name, _shape(d, 4), cls, 4, 8, **{"kernel_size": 3, **options})
        yield _case("unbatched", _shape(d, 4, batch=None), cls, 4, 8, 3, padding=1)
        yield _case("empty", _shape(d, 4, batch=0), cls, 4, 8, 3)


def _transposed() -> Iterator[Case]:
    for d, cls in (
        (1, nn.ConvTranspose1d),
        (2, nn.ConvTranspose2d),
        (3, nn.ConvTranspose3d),
    ):
        settings: dict[str, dict[str, Any]] = {
            "plain": {},
            "stride": {"stride": 2, "bias": False},
            "output_padding": {"stride": 2, "output_padding": 1, "padding": 1},
            "groups": {"groups": 2, "dilation": 2},
        }
        shape = _shape(d, 4, 4)
        for name, options in settings.items():
            yield _case(name, shape, cls, 4, 8, 3, **options)
        sizes = {"output_size": [9 + 2 * i + 1 for i in range(d)]}
        yield _case("output_size", shape, cls, 4, 8, 3, stride=2, call=sizes)
        yield _case("unbatched", _shape(d, 4, 4, batch=None), cls, 4, 8, 3)


def _matrices_and_tables() -> Iterator[Case]:
    yield _case("", (4, 5), nn.Linear, 5, 3)
    yield _case("no bias, 3-d", (2, 4, 5), nn.Linear, 5, 3, bias=False)
    yield _case("unbatched", (5,), nn.Linear, 5, 3)
    yield _case("empty", (0, 5), nn.Linear, 5, 3)
    tables = [
        _case("", (4, 6), nn.Embedding, 10, 3),
        _case(
            "padding_idx",
            (40,),
            nn.Embedding,
            10,
            3,
            padding_idx=2,
            scale_grad_by_freq=True,
        ),
        _case("max_norm", (4,), nn.Embedding, 10, 3, max_norm=0.5),
        _case("", (4, 6), nn.EmbeddingBag, 10, 3),
        _case(
            "max",
            (4, 6),
            nn.EmbeddingBag,
            10,
            3,
            mode="max",
            max_norm=0.5,
            padding_idx=1,
        ),
    ]
    yield from (replace(case, indices=10) for case in tables)
    yield replace(_case("", (6, 5), nn.Bilinear, 5, 4, 3), others=((6, 4),))
    rows = _case("no bias, 3-d", (2, 6, 5), nn.Bilinear, 5, 4, 3, bias=False)
    yield replace(rows, others=((2, 6, 4),))
    yield _case("", (3, 4), nn.Identity, 7, unused=True)


def _activations_and_pools() -> Iterator[Case]:
    smooth = (nn.ELU, nn.Hardsigmoid, nn.Hardswish, nn.Mish, nn.SiLU, nn.Sigmoid)
    for cls in (*smooth, nn.LeakyReLU, nn.ReLU):
        yield _case("", (3, 4), cls)
    yield _case("slope", (2, 3, 4), nn.LeakyReLU, 0.3)
    for d in (1, 2, 3):
        shape = _shape(d, 3)
        unbatched = _shape(d, 3, batch=None)
        pools = {
            "MaxPool": {"stride": 2, "padding": 1, "ceil_mode": True},
            "AvgPool": {"stride": 2, "count_include_pad": False, "padding": 1},
        }
        for kind, options in pools.items():
            cls = getattr(nn, f"{kind}{d}d")
            yield _case("plain", shape, cls, 3)
            yield _case("options", unbatched, cls, 3, **options)
        yield _case(
            "indices", shape, getattr(nn, f"MaxPool{d}d"), 2, return_indices=True
        )
        yield _case("", shape, getattr(nn, f"AdaptiveAvgPool{d}d"), 2)
        norm = getattr(nn, f"InstanceNorm{d}d")
        yield _case("plain", shape, norm, 3)
        yield _case(
            "affine, running", shape, norm, 3, affine=True, track_running_stats=True
        )
        yield _case("unbatched", unbatched, norm, 3)


def _recurrent() -> Iterator[Case]:
    for cls in (nn.LSTM, nn.GRU, nn.RNN):
        settings: dict[str, dict[str, Any]] = {
            "plain": {},
            "levels, both ways": {
                "num_layers": 2,
                "bidirectional": True,
                "batch_first": True,
            },
            "no bias": {"bias": False},
        }
        settings |= {"proj_size": {"proj_size": 3}} if cls is nn.LSTM else {}
        for name, options in settings.items():
            yield replace(_case(name, (6, 3, 5), cls, 5, 4, **options), exact=False)


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
    if isinstance(plain, nn.RNNBase):
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

    These are all attributes, by identity, and the entries of torch's registries, but for the
    buffers that hold the correction of a quantized layer.
    """
    out: dict[str, Any] = {"class": type(module)}
    for key, value in vars(module).items():
        out[key] = (
            {name: id(entry) for name, entry in value.items() if name not in OPTIONAL}
            if isinstance(value, dict)
            else id(value)
        )
    return out
