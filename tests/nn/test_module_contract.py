"""The module contract over its table, which covers every quantized twin of a torch layer."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.contracts.module_contract import (
    CASES,
    Case,
    by_hand,
    convert,
    set_modes,
    snapshot,
)
from torchq import QuantDescriptor
from torchq.nn import QUANTIZED, QuantModule, TensorQuantizer, convert_, revert_

# torch says once per process that it pads even kernels unevenly, and which kernel it lacks.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel lengths:UserWarning",
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning",
)


# One row for each class, and those whose code differs: what does not depend on the options runs
# over these.
FEW = [*{type(case.make()): case for case in reversed(CASES)}.values()]
FEW += [
    case
    for case in CASES
    if case.name
    in (
        "Conv2d circular",
        "Conv2d same",
        "ConvTranspose2d output_size",
        "Embedding max_norm",
    )
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """Every row."""
    return request.param


def flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in flat(part)]
    return [result]


def agree(case: Case, a: Any, b: Any) -> bool:
    """Tell whether a result is that of the reference: bit for bit where the row says so."""
    if case.exact:
        return equal(a, b)
    # float32 sums of a few products in another order, and no code that flips by it.
    return all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-5, atol=1e-6)
        for x, y in zip(flat(a), flat(b), strict=True)
    )


def equal(a: Any, b: Any) -> bool:
    return all(
        x.dtype is y.dtype and x.stride() == y.stride() and torch.equal(x, y)
        for x, y in zip(flat(a), flat(b), strict=True)
    )


def test_the_table_is_complete() -> None:
    torch_layers = {
        cls
        for cls, twin in QUANTIZED._entries.items()
        if cls.__module__.startswith("torch.nn") and not twin.is_container
    }
    # Several inputs and masks: tests/nn/test_attention.py.
    torch_layers -= {nn.MultiheadAttention}
    # Their results alone are quantized: tests/swap/test_folds.py.
    torch_layers -= {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
    assert {type(case.make()) for case in CASES} == torch_layers, (
        "every twin of a torch layer needs rows in module_contract.CASES"
    )


def test_off_is_torch(case: Case) -> None:
    """Bit for bit, strides and gradients too, in training and in eval mode."""
    plain, module = convert(case)
    set_modes(module, "off")
    for training in (True, False):
        x = case.inputs()
        y = case.inputs()
        expected = plain.train(training)(*x, **case.kwargs)
        got = module.train(training)(*y, **case.kwargs)
        assert equal(got, expected)
        if flat(got)[0].requires_grad:
            flat(expected)[0].square().sum().backward()
            flat(got)[0].square().sum().backward()
            grads = [
                *((a.grad, b.grad) for a, b in zip(x, y, strict=True)),
                *(
                    (p.grad, module.get_parameter(n).grad)
                    for n, p in plain.named_parameters()
                ),
            ]
            assert all((a is None and b is None) or torch.equal(a, b) for a, b in grads)  # type: ignore[arg-type]


def test_quantized_is_by_hand(case: Case) -> None:
    plain, module = convert(case)
    x = case.inputs()
    assert agree(
        case,
        module(*x, **case.kwargs),
        by_hand(case, plain, x),
    )
    if x[0].numel() and not isinstance(plain, nn.Embedding | nn.EmbeddingBag):
        assert not equal(
            module(*x, **case.kwargs), plain(*x, **case.kwargs)
        ) or isinstance(plain, nn.MaxPool1d)


def test_every_quantizer_works(case: Case) -> None:
    """Switching one of them off changes the result; none is a decoration."""
    _, module = convert(case)
    x = case.inputs()
    full = module(*x, **case.kwargs)
    for slot in module.slots() if x[0].numel() else ():
        quantizer = getattr(module, f"{slot}_quantizer")
        if quantizer.mode == "off":
            continue  # The gate of SiLU is switched on for a target only.
        quantizer.mode = "off"
        assert not equal(module(*x, **case.kwargs), full), slot
        quantizer.mode = "quantize"


def test_gradients_reach_input_and_parameters(case: Case) -> None:
    plain, module = convert(case)
    x = case.inputs()
    y = case.inputs()
    expected = flat(by_hand(case, plain, x))[0]
    got = flat(module(*y, **case.kwargs))[0]
    if not got.requires_grad:
        assert not expected.requires_grad
        return
    expected.square().sum().backward()
    got.square().sum().backward()
    for (name, parameter), other in zip(
        plain.named_parameters(), module.parameters(), strict=False
    ):
        assert parameter.grad is not None
        assert other.grad is not None
        assert agree(case, parameter.grad, other.grad), name
    for a, b in zip(x, y, strict=True):
        if a.is_floating_point():
            assert a.grad is not None
            assert b.grad is not None
            assert agree(case, a.grad, b.grad)


def test_convert_and_revert_are_inverse(case: Case) -> None:
    module = case.make().eval()
    module.i = 3
    module.f = -1
    calls: list[str] = []
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_forward_hook(lambda *_: calls.append("after"))
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    elsewhere = [module]
    before = snapshot(module)
    reference = module(*case.inputs(), **case.kwargs)
    for _ in range(2):
        assert (
            convert_(module, input=QuantDescriptor(), weight=QuantDescriptor())
            is module
        )
        assert isinstance(elsewhere[0], QuantModule)
        assert isinstance(module, type(case.make()))
        assert {
            key: snapshot(module)[key]
            for key in before
            if key not in ("class", "_modules")
        } == {key: before[key] for key in before if key not in ("class", "_modules")}
        assert not any(part.training for part in module.modules())
        module(*case.inputs(), **case.kwargs)
        assert revert_(module) is module  # type: ignore[arg-type]
        assert snapshot(module) == before
    assert equal(module(*case.inputs(), **case.kwargs), reference)
    assert calls == ["before", "after"] * 4


@pytest.mark.parametrize("case", FEW, ids=str)
def test_copies(case: Case) -> None:
    _, module = convert(case)
    x = tuple(tensor.detach() for tensor in case.inputs())
    expected = module(*x, **case.kwargs)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module)
        assert equal(twin(*x, **case.kwargs), expected)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_bfloat16_and_double(case: Case) -> None:
    """The result has the module's dtype; ranges stay float32."""
    for dtype in (torch.bfloat16, torch.float64):
        plain, module = convert(case)
        module.to(dtype)
        x = tuple(
            tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
            for tensor in case.inputs()
        )
        if dtype is torch.bfloat16 and isinstance(plain, nn.AvgPool3d):
            continue  # torch has no such kernel on the CPU
        y = flat(module(*x, **case.kwargs))[0]
        assert y.dtype is dtype
        assert bool(y.isfinite().all())
        assert all(
            q.amax.dtype is torch.float32
            for q in module.modules()
            if isinstance(q, TensorQuantizer)
        )


def calibrated(case: Case) -> tuple[QuantModule, tuple[torch.Tensor, ...]]:
    """Return an eval module with fixed ranges, and its inputs."""
    _, module = convert(case)
    inputs = tuple(tensor.detach() for tensor in case.inputs())
    for slot, x in zip(module.input_slots, inputs, strict=False):
        getattr(module, f"{slot}_quantizer").calibrate_on(
            x if x.numel() else torch.ones(1)
        )
    for quantizer, weight in module.quantized_weights():
        quantizer.calibrate_on(weight)
    return module.eval(), inputs


class Holder(nn.Module):
    """Calls the module with its keyword arguments: what a tracer starts from."""

    def __init__(self, inner: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.inner = inner
        self.kwargs = kwargs

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x, **self.kwargs)


class PairHolder(Holder):
    """:class:`Holder` of a module with two inputs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.inner(x, y, **self.kwargs)


def holder_of(case: Case, module: nn.Module) -> Holder:
    return (PairHolder if case.others else Holder)(module, case.kwargs)


@pytest.mark.sample(16)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_exports(case: Case) -> None:
    """torch.export gives a program with the same result."""
    module, x = calibrated(case)
    holder = holder_of(case, module)
    with torch.no_grad():
        program = torch.export.export(holder, x, strict=False).module()
        assert all(
            torch.equal(a, b)
            for a, b in zip(flat(program(*x)), flat(holder(*x)), strict=True)
        )


@pytest.mark.sample(60)
def test_symbolic_trace(case: Case) -> None:
    module, x = calibrated(case)
    if (
        isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
        or "output_size" in case.kwargs
    ):
        pytest.skip(
            "torch's own code branches on the shape of its input here; torch.fx "
            "goes round that in classes of torch.nn alone"
        )
    if isinstance(module, nn.RNNBase):
        pytest.skip("the steps are a loop over the length of the input")
    traced = torch.fx.symbolic_trace(holder_of(case, module))
    assert equal(
        traced(*x),
        module(*x, **case.kwargs),
    )


def test_direct_construction() -> None:
    for float_class, cls in QUANTIZED._entries.items():
        if cls.slots() and float_class.__module__.startswith("torch.nn.modules"):
            args = {
                "Conv": (4, 8, 3),
                "Bilinear": (4, 2, 3),
                "Linear": (4, 2),
                "Embedding": (5, 3),
                "InstanceNorm": (3,),
                "Pool": (2,),
                "Multihead": (4, 2),
                **dict.fromkeys(("LSTM", "GRU", "RNN"), (4, 2)),
                "": (),
            }
            given = next(
                value for key, value in args.items() if key in float_class.__name__
            )
            module = cls(*given, input_descriptor=QuantDescriptor(4))
            assert isinstance(module, float_class)
            assert cls.__qualname__ == f"Quant{float_class.__name__}"
            if cls.input_slots:
                first = getattr(module, f"{cls.input_slots[0]}_quantizer")
                assert first.descriptor == QuantDescriptor(4)
            if cls.weight_slots:
                first = getattr(module, f"{cls.weight_slots[0]}_quantizer")
                assert first.descriptor == QuantDescriptor(
                    axis=1 if "Transpose" in cls.__name__ else 0
                )
