"""Operators as modules, and forwards that call them.

They have torch's numbers when off, and follow the definition when on.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError
from torchq.functional import fake_quantize
from torchq.nn import QuantModule, convert_, revert_, share_quantizers_
from torchq.nn.calls.modules import RoutedModule, route_

BINARY = [
    (torchq.nn.QuantAdd, torch.add),
    (torchq.nn.QuantMul, torch.mul),
    (torchq.nn.QuantMatMul, torch.matmul),
]


@pytest.mark.parametrize(
    ("cls", "function"), BINARY, ids=lambda value: getattr(value, "__name__", "")
)
def test_binary_operators(cls: type[Any], function: Any, dtype: torch.dtype) -> None:
    module = cls()
    x = torch.randn(4, 4, dtype=dtype)
    y = 3 * torch.randn(4, 4, dtype=dtype)
    with torchq.disabled(module):
        assert torch.equal(module(x, y), function(x, y))
    assert torch.equal(
        module(x, y),
        function(fake_quantize(x, x.abs().max()), fake_quantize(y, y.abs().max())),
    )
    module.input_quantizer.set_amax(1.0)
    module.other_quantizer.set_amax(2.0)
    assert torch.equal(
        module(x, y), function(fake_quantize(x, 1.0), fake_quantize(y, 2.0))
    )


@pytest.mark.parametrize(
    "other", [2, 0.5, torch.tensor([[1, 2], [3, 4]])], ids=["int", "float", "integers"]
)
def test_operands_that_are_no_floats_pass(other: Any) -> None:
    module = torchq.nn.QuantMul()
    x = torch.tensor([[1.0, -1.0], [0.5, 0.25]])
    assert torch.equal(
        module(x, other),
        fake_quantize(x, 1.0) * other,
    )
    module.other_quantizer.set_amax(1.0)
    assert torch.equal(
        module(x, other),
        fake_quantize(x, 1.0) * other,
    )


def test_cat_has_one_range() -> None:
    module = torchq.nn.QuantCat(0)
    a = torch.randn(2, 3)
    b = 10 * torch.randn(4, 3)
    torchq.calibrate(
        module, [[a, b]], forward=lambda m, batch: m(batch), progress=False
    )
    amax = torch.cat([a, b]).abs().max()
    assert torch.equal(module.input_quantizer.amax, amax)
    assert torch.equal(
        module([a, b]),
        fake_quantize(torch.cat([a, b]), amax),
    )
    assert torch.equal(
        module((a.t(), b.t()), dim=1), fake_quantize(torch.cat([a, b]), amax).t()
    )


def test_float_modules_are_swapped_and_restored() -> None:
    model = nn.ModuleDict(
        {
            "add": torchq.nn.Add(),
            "cat": torchq.nn.Cat(0),
            "tap": torchq.nn.Tap(),
        }
    )
    for module in model.values():
        convert_(module, input=QuantDescriptor(4))
        assert isinstance(module, QuantModule)
    assert [name for name, _ in model["add"].named_children()] == [
        "input_quantizer",
        "other_quantizer",
    ]
    assert model["add"].other_quantizer.descriptor == QuantDescriptor(4)
    torchq.restore_(model)
    assert [type(m).__name__ for m in model.values()] == ["Add", "Cat", "Tap"]
    assert not list(model["add"].children())
    assert torch.equal(
        model["cat"]([torch.ones(1), torch.zeros(1)]), torch.tensor([1.0, 0.0])
    )


class Gate(nn.Module):
    """Two sums, one of which depends on the mode, a dropout, and a keyword with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, shift: float = 0.0
    ) -> Tensor:
        y = self.linear(x) + x
        y = F.dropout(y, 0.5, training=self.training)
        return y * self.scale if mask is None else y + mask


def wired(module: nn.Module, child: nn.Module, site: str = "@0") -> nn.Module:
    """Let a child named ``q`` stand for the operator at a site."""
    module.add_module("q", child)
    return route_(module, {site: "q"})


def test_wiring_changes_the_forward_alone() -> None:
    module = Gate()
    x = torch.randn(3, 4)
    expected = module.eval()(x)
    before = dict(module.named_parameters())
    wired(module, torchq.nn.Add())
    assert isinstance(module, RoutedModule)
    assert isinstance(module, Gate)
    assert torch.equal(module(x), expected)
    assert torch.equal(module(x=x), expected)
    assert torch.equal(module(x, mask=None), expected)
    assert all(value is before[name] for name, value in module.named_parameters())
    seen: list[Tensor] = []
    handle = module.q.register_forward_hook(lambda m, args, out: seen.append(out))
    module(x)
    handle.remove()
    assert torch.equal(
        seen[0],
        module.linear(x) + x,
    )
    assert type(revert_(module)) is Gate
    assert list(vars(module)) == list(vars(Gate()))
    assert [n for n, _ in module.named_children()] == ["linear"]
    assert torch.equal(module(x), expected)


def test_wiring_needs_the_operator() -> None:
    module = Gate()
    for site in ("@7", "add"):
        message = f"Gate: its forward has no operator {site}; expected the code that was quantized"
        with pytest.raises(QuantizationError, match=message):
            wired(module, torchq.nn.Add(), site)
    assert type(module) is Gate
    module.forward = module.forward  # type: ignore[method-assign]
    with pytest.raises(QuantizationError, match="forward was replaced on the instance"):
        route_(module, {})


class Growing(nn.ModuleDict):
    """Iterates over its own children, like a DenseNet block."""

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features[-1]))
        return torch.cat(features, 1)


def test_a_forward_that_iterates_over_its_children_does_not_meet_the_new_ones() -> None:
    module = Growing({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    x = torch.randn(2, 3)
    expected = module(x)
    wired(module, torchq.nn.Cat())
    for candidate in (module, copy.deepcopy(module)):
        assert torch.equal(candidate(x), expected)


def test_sharing_is_one_quantizer(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )

    model = make()
    torchq.quantize_(model)
    shared = torchq.qat.share_range_(model, ["0.*", "2.input_quantizer"])
    assert model[0].input_quantizer is model[2].input_quantizer is shared
    assert model[1].input_quantizer is not shared
    x = 5 * torch.randn(8, 4)
    torchq.calibrate(model, [x], progress=False)
    for twin in (copy.deepcopy(model), torchq.load(make(), saved(model, tmp_path))):
        assert twin[0].input_quantizer is twin[2].input_quantizer
        assert torch.equal(twin(x), model(x))
    again = make()
    torchq.quantize_(again)
    again.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(again(x), model(x))


def saved(model: nn.Module, folder: Path) -> Path:
    torchq.save(model, folder / "m.pt")
    return folder / "m.pt"


def test_sharing_takes_the_largest_known_range() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Linear(4, 4),
    )
    torchq.quantize_(model)
    model[0].input_quantizer.set_amax(1.0)
    model[1].input_quantizer.set_amax(3.0)
    assert (
        share_quantizers_(model, ["0.input_quantizer", "1.input_quantizer"]).amax == 3.0
    )


def test_what_cannot_be_shared_is_refused() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Linear(4, 4),
    )
    torchq.quantize_(model)
    message = (
        r"share_range_: '0\.\*' selects \['0\.input_quantizer'\]; expected at least two"
    )
    with pytest.raises(ConfigError, match=message):
        torchq.qat.share_range_(model, "0.*")
    message = "share: 0 is QuantLinear; expected the path of a quantizer"
    with pytest.raises(QuantizationError, match=message):
        share_quantizers_(model, ["0", "1"])
    message = (
        r"share: 0\.weight_quantizer is int8 axis=0 max; expected int8 per-tensor max"
    )
    with pytest.raises(ConfigError, match=message):
        share_quantizers_(model, ["1.input_quantizer", "0.weight_quantizer"])
    with pytest.raises(ConfigError, match="expected a range per tensor"):
        share_quantizers_(model, ["1.weight_quantizer", "0.weight_quantizer"])
