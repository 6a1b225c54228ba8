from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated, sqnr
from torchq.lowering.modules import fp8_linear as modules
from torchq.lowering.modules.fp8_linear import Fp8Linear
from torchq.lowering.ops import cuda, fp8
from torchq.lowering.ops.kernel_cache import KERNELS

D = torchq.QuantDescriptor
E4M3, E5M2 = D((4, 3)), D((5, 2))
PER_CHANNEL = D((4, 3), axis=0)
OPERANDS = [
    (E4M3, PER_CHANNEL),
    (E4M3, E4M3),
    (E5M2, PER_CHANNEL),
    (E4M3, D((5, 2), axis=0)),
    (D((4, 3), scale_amax=0.5), PER_CHANNEL),
]
RANGES = [
    D((4, 3), dynamic=True),
    D((4, 3), dynamic=True, axis=(0, 1)),
    D((5, 2), dynamic=True, axis=0),
    D((4, 3), dynamic=True, scale_amax=2.0),
]


def has_cpu_product() -> bool:
    """Return True if this torch has the product on this CPU too.

    It has where oneDNN has it: with AMX or AVX10.2.
    """
    x, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch.ops.aten._scaled_mm(x, x.t(), one, one, out_dtype=torch.float32)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def config(
    x: torchq.QuantDescriptor = E4M3, weight: torchq.QuantDescriptor = PER_CHANNEL
) -> torchq.QuantConfig:
    return torchq.QuantConfig((torchq.Rule(nn.Linear, input=x, weight=weight),))


def linear(inner: int, outer: int, **options: Any) -> nn.Linear:
    """A layer whose channels differ in size."""
    layer = nn.Linear(inner, outer, **options)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-2, 1, outer).unsqueeze(1))
    return layer


def in_float64(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the simulation with float64 products, and the sum of their magnitudes."""
    operands = model.input_quantizer(x).double(), model.weight_quantizer(model.weight).double()  # type: ignore[operator]
    y = nn.functional.linear(*operands)
    size = nn.functional.linear(*(t.abs() for t in operands))
    return (
        (y, size)
        if model.bias is None
        else (y + model.bias.double(), size + model.bias.double().abs())
    )  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(("x", "weight"), [*OPERANDS, *((x, PER_CHANNEL) for x in RANGES)], ids=str)
@pytest.mark.parametrize(
    ("shape", "outer", "bias"), [((3, 5, 64), 48, True), ((2, 7, 24), 5, False)], ids=str
)
def test_a_layer_equals_its_simulation(
    x: torchq.QuantDescriptor,
    weight: torchq.QuantDescriptor,
    shape: tuple[int, ...],
    outer: int,
    bias: bool,
    generator: torch.Generator,
) -> None:
    data = torch.randn(shape, generator=generator)
    model = calibrated(linear(shape[-1], outer, bias=bias), data, config(x, weight))
    deployed = torchq.deploy(model, data)
    assert isinstance(deployed, Fp8Linear)
    data = data * 1.5  # beyond the calibrated range: values saturate
    data[0, 0] = 0  # a token without a range
    expected, size = in_float64(model, data)
    got = deployed(data)
    assert got.dtype is torch.float32 and got.shape == expected.shape
    # Float32 rounds each operand of the products, the sums, and three factors and terms behind.
    assert bool(((got - expected).abs() <= 2.0**-24 * (shape[-1] + 8) * size).all())


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
def test_codes_are_those_of_the_simulation(format: torchq.QuantDescriptor) -> None:
    qparams = torch.tensor(format.format.values)
    x = torch.cat(
        [
            qparams,
            (qparams[1:] + qparams[:-1]) / 2,
            qparams * 1.01,
            torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan]),
        ]
    ).unsqueeze(1)
    model = calibrated(nn.Linear(1, 1, bias=False), qparams[-1:].unsqueeze(1), config(format, E4M3))
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.weight_quantizer.set_amax(448.0)  # type: ignore[operator, union-attr]
    # The scale is 1, and so is the weight: results are the codes.
    assert torch.equal(torchq.deploy(model)(x).nan_to_num(nan=7e4), model(x).nan_to_num(nan=7e4))


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64)], ids=str)
@pytest.mark.parametrize("x", [E4M3, RANGES[0]], ids=str)
def test_vectors_and_empty_batches(
    shape: tuple[int, ...], x: torchq.QuantDescriptor, generator: torch.Generator
) -> None:
    model = calibrated(nn.Linear(64, 5), torch.randn(4, 64, generator=generator), config(x))
    data = torch.randn(shape, generator=generator)
    torch.testing.assert_close(torchq.deploy(model)(data), model(data).detach())


def test_dead_ranges_give_the_bias() -> None:
    model = calibrated(nn.Linear(8, 3), torch.zeros(2, 8), config())
    assert torch.equal(torchq.deploy(model)(torch.randn(5, 8)), model.bias.expand(5, 3))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("x", [E4M3, RANGES[1]], ids=str)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_models_of_16_bits(
    low: torch.dtype, x: torchq.QuantDescriptor, generator: torch.Generator
) -> None:
    data = torch.randn(3, 5, 64, generator=generator).to(low)
    model = calibrated(nn.Linear(64, 32).to(low), data, config(x))
    deployed = torchq.deploy(model)
    got = deployed(data)
    # Of bfloat16, the operands of the simulation and its results have 8 bits.
    assert got.dtype is deployed.weight.dtype is low and sqnr(got, model(data)) > 38


def test_another_dtype_keeps_codes_and_steps(generator: torch.Generator) -> None:
    x = torch.randn(4, 64, generator=generator)
    deployed = torchq.deploy(calibrated(nn.Linear(64, 32), x, config()))
    expected = deployed(x.bfloat16().float()).bfloat16()
    changed = copy.deepcopy(deployed).to(torch.bfloat16)
    assert changed.weight_scale.dtype is torch.float32 and changed.weight.dtype is torch.bfloat16
    assert torch.equal(changed(x.bfloat16()), expected)


def test_scales_in_front_are_applied(generator: torch.Generator) -> None:
    x = torch.randn(4, 64, generator=generator)
    model = calibrated(nn.Linear(64, 32), x, config())
    model.input_quantizer.pre_quant_scale = torch.rand(64, generator=generator) + 0.5  # type: ignore[union-attr]
    torch.testing.assert_close(torchq.deploy(model)(x), model(x).detach())


@pytest.mark.parametrize("x", [E4M3, RANGES[1]], ids=str)
def test_a_layer_survives_copies_files_and_compilers(
    x: torchq.QuantDescriptor, generator: torch.Generator
) -> None:
    data = torch.randn(2, 3, 64, generator=generator)
    first, second = (
        torchq.deploy(calibrated(nn.Linear(64, 32), data, config(x))) for _ in range(2)
    )
    expected = first(data)
    assert not torch.equal(second(data), expected)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    compiled = torch.compile(first, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(first, (data,)).module()
    for other in (
        copy.deepcopy(first),
        pickle.loads(pickle.dumps(first)),
        second,
        compiled,
        exported,
    ):
        assert torch.equal(other(data), expected)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.9
def test_an_exported_program_can_be_saved(generator: torch.Generator) -> None:
    x = torch.randn(3, 64, generator=generator)
    deployed = torchq.deploy(calibrated(nn.Linear(64, 32), x, config()))
    file = io.BytesIO()
    torch.export.save(
        torch.export.export(deployed, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)), file
    )
    file.seek(0)
    loaded = torch.export.load(file).module()
    for data in (x, torch.randn(9, 64, generator=generator)):
        assert torch.equal(loaded(data), deployed(data))


REASONS = [
    (E5M2, E5M2, "torch._scaled_mm does not multiply e5m2 by e5m2 numbers"),
    (D((2, 1)), E4M3, "no product of e2m1 by e4m3 numbers; FP8 is e4m3 or e5m2"),
    (E4M3, D((4, 3), axis=1), "weight ranges are neither per tensor nor per output channel"),
    (E4M3, D((4, 3), block_size=16), "weight ranges are neither per tensor nor per output channel"),
    (D((4, 3), axis=1), E4M3, "activations have more than one range"),
    (D((4, 3), dynamic=True, axis=-1), E4M3, "its dynamic input has a range per feature"),
    (D((4, 3), dynamic=True, block_size=16), E4M3, "its dynamic input has blocks"),
    (D((4, 3), fake_quant=False), E4M3, "a quantizer returns codes"),
    (D(8), E4M3, "weight format e4m3 does not fit int8"),
    (E4M3, D(8), "format e4m3 has no 8-bit integer kernel"),
]


@pytest.mark.parametrize(("x", "weight", "reason"), REASONS, ids=str)
def test_others_keep_simulating_and_say_why(
    x: torchq.QuantDescriptor, weight: torchq.QuantDescriptor, reason: str
) -> None:
    data = torch.randn(4, 32)
    deployed = torchq.deploy(calibrated(nn.Linear(32, 16), data, config(x, weight)))
    (row,) = torchq.summary(deployed).layers
    assert (row.kernel, row.note) == ("simulated", reason)


def test_ranges_along_features_are_refused() -> None:
    model = calibrated(nn.Linear(8, 4), torch.randn(3, 8), config(D((4, 3), dynamic=True, axis=1)))
    with pytest.raises(
        torchq.errors.ExportError,
        match=r"Fp8Linear: got ranges along the features of \(3, 8\); expected one per token",
    ):
        torchq.deploy(model)(torch.randn(3, 8))


def test_the_summary_names_kernel_bytes_and_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed = torchq.deploy(calibrated(nn.Linear(64, 32), torch.randn(3, 64), config(RANGES[0])))
    (row,) = torchq.summary(deployed).layers
    reason = (
        "the input's range is that of each call; "
        "torch._scaled_mm is used on CUDA devices, not on cpu"
    )
    # A byte for each weight, and four for the scale and the bias of each output.
    assert (row.kernel, row.bytes, row.note) == (
        "reference e4m3 x e4m3 -> float",
        64 * 32 + 2 * 4 * 32,
        reason,
    )
    cuda.missing.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert (
        fp8.obstacle(torch.device("cuda", 7))
        == "torch._scaled_mm needs compute capability 8.9, this GPU has 8.6"
    )
    cuda.missing.cache_clear()


class CudaRules:
    """``_scaled_mm`` as CUDA has it for scales of a whole tensor.

    The checks are those of torch and of cuBLASLt (row by column).
    """

    def _scaled_mm(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype
    ) -> Tensor:
        assert {a.dtype, b.dtype} <= {
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        } and not a.dtype is b.dtype is torch.float8_e5m2
        assert a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        assert (
            scale_a.dtype is scale_b.dtype is torch.float32
            and scale_a.numel() == scale_b.numel() == 1
        )
        return ((a.double() @ b.double()) * scale_a * scale_b).to(out_dtype)


@pytest.mark.parametrize("product", ["rules of CUDA", "of CPUs"])
@pytest.mark.parametrize("x", [E4M3, E5M2, *RANGES], ids=str)
@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (20, 5)])
def test_the_path_of_gpus(
    x: torchq.QuantDescriptor,
    inner: int,
    outer: int,
    product: str,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
) -> None:
    if product == "of CPUs" and not has_cpu_product():
        pytest.skip("this torch has no _scaled_mm on this CPU")
    wide = torch.randn(3, 5, 2 * inner, generator=generator)
    model = calibrated(linear(inner, outer), wide[..., :inner], config(x))
    deployed = torchq.deploy(model)
    before = len(KERNELS)
    with monkeypatch.context() as patched:
        if product == "rules of CUDA":
            patched.setattr(torch.ops, "aten", CudaRules())
        patched.setattr(fp8, "obstacle", lambda device: "")
        patched.setattr(modules, "fp8_linear", fp8.linear_cuda)
        inputs = (
            wide[..., :inner],
            wide[..., ::2],
            wide[..., :inner].transpose(0, 1),
            wide[:1, :0, :inner],
        )
        results = [deployed(data) for data in inputs]
    assert len(KERNELS) == before + 1
    for data, got in zip(inputs, results, strict=True):
        expected, size = in_float64(model, data)
        assert got.shape == expected.shape and bool(
            ((got - expected).abs() <= 2.0**-24 * (inner + 8) * size).all()
        )
    del deployed
    assert len(KERNELS) == before


@pytest.fixture
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "aten", CudaRules())
    monkeypatch.setattr(fp8, "obstacle", lambda device: "")
    monkeypatch.setattr(modules, "fp8_linear", fp8.linear_cuda)


def test_a_loaded_weight_is_prepared_anew(gpu_path: None, generator: torch.Generator) -> None:
    x = torch.randn(4, 20, generator=generator)
    first, second = (torchq.deploy(calibrated(nn.Linear(20, 5), x, config())) for _ in range(2))
    expected = first(x)
    assert not torch.equal(second(x), expected)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x), expected)


def test_dead_ranges_give_the_bias_on_gpus_too(gpu_path: None) -> None:
    model = calibrated(nn.Linear(8, 3), torch.zeros(2, 8), config())
    assert torch.equal(torchq.deploy(model)(torch.randn(5, 8)), model.bias.expand(5, 3))  # type: ignore[operator, union-attr]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("x", [E4M3, E5M2, *RANGES], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_on_a_gpu(x: torchq.QuantDescriptor, rows: int) -> None:
    if problem := fp8.obstacle(torch.device("cuda", 0)):
        pytest.skip(problem)
    data = torch.randn(2, rows, 72, device="cuda")
    model = calibrated(linear(72, 40).cuda(), data, config(x))
    deployed = torchq.deploy(model)
    expected, size = in_float64(model, data)
    # The tensor cores of Hopper keep 14 bits of partial sums.
    assert bool(((deployed(data) - expected).abs() <= 2.0**-12 * size).all())
    assert torchq.summary(deployed).layers[0].kernel.startswith("scaled_mm")
