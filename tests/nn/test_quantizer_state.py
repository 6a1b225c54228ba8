"""The state of a TensorQuantizer: checkpoints, copies, dtypes, devices, scales held as they are."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import Parts, simulated
from torchq import QuantDescriptor, TensorQuantizer
from torchq.errors import ConfigError
from torchq.functional import QParams, Range

ROOT = Path(__file__).resolve().parents[2]
DESCRIPTORS = [
    QuantDescriptor(),
    QuantDescriptor(4, axis=0),
    QuantDescriptor(4, axis=(0, 1)),
    QuantDescriptor(block_size=2),
    QuantDescriptor(learn_amax=True),
    QuantDescriptor(axis=0, learn_amax=True),
    QuantDescriptor(amax=2.0),
    QuantDescriptor(unsigned=True, symmetric=False),
]


@pytest.fixture
def x(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 6, generator=generator)


def calibrated(d: QuantDescriptor, x: torch.Tensor) -> TensorQuantizer:
    q = TensorQuantizer(d)
    q.calibrate_on(x)
    return q


def same_range(one: TensorQuantizer, other: TensorQuantizer) -> bool:
    pairs = zip(
        one.range.ends(),
        other.range.ends(),
        strict=True,
    )
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("d", DESCRIPTORS, ids=str)
def test_strict_load_into_an_uncalibrated_twin(
    d: QuantDescriptor, assign: bool, x: torch.Tensor
) -> None:
    q = calibrated(d, x)
    twin = TensorQuantizer(d)
    names = ["amax"] if d.symmetric else ["amin", "amax"]
    assert list(twin.state_dict()) == names == list(q.state_dict())
    buffer = io.BytesIO()
    torch.save(q.state_dict(), buffer)
    buffer.seek(0)
    twin.load_state_dict(
        torch.load(buffer, weights_only=True), strict=True, assign=assign
    )
    assert twin.calibrated
    assert same_range(twin, q)
    assert isinstance(twin.amax, nn.Parameter) == d.learn_amax
    assert torch.equal(twin(x), q(x))
    twin.load_state_dict(
        TensorQuantizer(d.replace(amax=None)).state_dict(), strict=True, assign=assign
    )
    assert not twin.calibrated  # an uncalibrated checkpoint is one too


@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("key", ["_amax", "amax"])
def test_legacy_keys_and_shapes(
    key: str, shape: tuple[int, ...], x: torch.Tensor
) -> None:
    q = TensorQuantizer(QuantDescriptor(axis=0))
    values = torch.rand(shape) + 0.5
    q.load_state_dict({key: values}, strict=True)
    assert q.amax.shape == shape
    by_row = values.reshape(-1, 1).expand(4, 1)
    assert torch.equal(
        q(x),
        torchq.functional.fake_quantize(
            x, by_row, granularity=q.descriptor.granularity
        ),
    )


def test_legacy_pre_quant_scale() -> None:
    q = TensorQuantizer()
    q.load_state_dict(
        {"_amax": torch.tensor(1.0), "_pre_quant_scale": torch.full((3,), 2.0)}
    )
    assert q.pre_quant_scale is not None
    assert q.pre_quant_scale.tolist() == [2.0] * 3


def test_loading_other_dtypes_keeps_float32(low_dtype: torch.dtype) -> None:
    q = TensorQuantizer()
    q.load_state_dict({"amax": torch.tensor(1.5, dtype=low_dtype)}, assign=True)
    assert q.amax.dtype is torch.float32
    assert q.amax.item() == 1.5


@pytest.mark.parametrize("d", DESCRIPTORS, ids=str)
def test_deepcopy_and_pickle(d: QuantDescriptor, x: torch.Tensor) -> None:
    """Uncalibrated, observing, calibrated, and after forward and backward."""
    q = TensorQuantizer(d)
    for prepare in (
        lambda: None,
        lambda: (q.start_calibration(), q(x)),
        q.finish_calibration,
        lambda: q(x.requires_grad_()).sum().backward(),
    ):
        prepare()
        for twin in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
            assert (twin.mode, twin.descriptor, twin.name) == (
                q.mode,
                q.descriptor,
                q.name,
            )
            assert same_range(twin, q)
            assert twin.amax is not q.amax
            assert isinstance(twin.amax, nn.Parameter) == d.learn_amax
            assert torch.equal(twin(x), q(x))


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "to_half"])
@pytest.mark.parametrize("d", DESCRIPTORS, ids=str)
def test_amax_keeps_float32_to_the_bit(
    d: QuantDescriptor, convert: str, x: torch.Tensor
) -> None:
    model = nn.Sequential(
        nn.Linear(6, 2),
        calibrated(d, x),
    )
    q = model[1]
    before = copy.deepcopy(q)
    parameter = q.amax
    model.to(torch.half) if convert == "to_half" else getattr(model, convert)()
    assert model[0].weight.dtype is not torch.float32
    assert q.amax.dtype is torch.float32
    assert same_range(q, before)
    assert isinstance(q.amax, nn.Parameter) == d.learn_amax
    if d.learn_amax:
        assert q.amax is parameter
    y = q(x.to(model[0].weight.dtype))
    assert y.dtype is model[0].weight.dtype
    assert bool(y.isfinite().all())


@pytest.mark.parametrize(
    "d",
    [
        DESCRIPTORS[0],
        QuantDescriptor(axis=0, learn_amax=True),
        DESCRIPTORS[-1],
    ],
    ids=str,
)
def test_meta_to_empty_and_load(d: QuantDescriptor, x: torch.Tensor) -> None:
    """A model built on the meta device, given memory and loaded has its range where it is."""
    q = calibrated(d, x)
    with torch.device("meta"):
        built = TensorQuantizer(d)
    assert built.amax.is_meta
    for meta in (built, copy.deepcopy(q).to("meta")):
        real = meta.to_empty(device="cpu")
        real.load_state_dict(q.state_dict(), strict=True)
        assert real.amax.device.type == "cpu"
        assert same_range(real, q)
        assert torch.equal(real(x), q(x))
    with torch.device("meta"):
        built = TensorQuantizer(d)
    built.load_state_dict(q.state_dict(), assign=True)
    assert torch.equal(built(x), q(x))


@pytest.mark.parametrize("switch", ["observing", "quantizing"])
@pytest.mark.parametrize("value", [None, "yes", 1, torch.tensor(True)])
def test_a_switch_is_true_or_false(switch: str, value: Any) -> None:
    q = TensorQuantizer()
    before = q.mode
    with pytest.raises(
        ConfigError, match=rf"TensorQuantizer: got {switch}=.*; expected True or F"
    ):
        setattr(q, switch, value)
    assert q.mode == before


def test_an_assigned_range_is_checked_and_stays_float32() -> None:
    q = TensorQuantizer(QuantDescriptor(amax=1.0))
    for bad in (-1.0, float("nan"), float("inf"), 1j):
        with pytest.raises(
            ConfigError, match=r"got amax .*; expected finite numbers >= 0"
        ):
            q.amax = torch.tensor(bad)
    assert q.amax == 1
    for dtype in (torch.float16, torch.float64, torch.int64):
        q.amax = torch.tensor(2, dtype=dtype)
        assert q.amax.dtype is torch.float32
        assert q.amax == 2
    q.amax = torch.empty(0)
    assert not q.calibrated
    both = TensorQuantizer(
        QuantDescriptor(symmetric=False, unsigned=True, amin=-1.0, amax=1.0)
    )
    with pytest.raises(ConfigError, match=r"got amin .*; expected finite numbers <= 0"):
        both.amin = torch.tensor(1.0)


@pytest.mark.parametrize("lost", ["input_quantizer", "weight_quantizer"])
def test_a_checkpoint_of_a_quantized_layer_without_a_range_does_not_load_strictly(
    lost: str, x: torch.Tensor
) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(
            nn.Linear(6, 6),
            nn.ReLU(),
            nn.Linear(6, 2),
        )
        torchq.quantize_(model)
        return model

    model = build()
    torchq.calibrate(model, [x], progress=False)
    part = {
        key: value
        for key, value in model.state_dict().items()
        if f"2.{lost}" not in key
    }
    with pytest.raises(RuntimeError, match=rf'Missing key.*: "2\.{lost}\.amax"'):
        build().load_state_dict(part, strict=True)
    actual = build().load_state_dict(part, strict=False)
    assert (actual.missing_keys, actual.unexpected_keys) == ([f"2.{lost}.amax"], [])


def test_a_float_layer_of_a_checkpoint_leaves_the_ranges_as_they_are(
    x: torch.Tensor,
) -> None:
    model = nn.Sequential(
        nn.Linear(6, 6),
        nn.ReLU(),
        nn.Linear(6, 2),
    )
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    simulated(model, [x])
    expected = model(x)
    model.load_state_dict(plain, strict=True)
    assert torch.equal(model(x), expected)


def test_a_range_of_a_shared_quantizer_may_be_in_a_checkpoint_once(
    x: torch.Tensor,
) -> None:
    class Sum(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    model = Sum(
        a=nn.Conv2d(1, 1, 1),
        b=nn.Conv2d(1, 1, 1),
    )
    image = x.reshape(1, 1, -1, 6)
    torchq.quantize_(model, target="tensorrt")
    torchq.qat.share_range_(model, "quant_add.*")
    torchq.calibrate(model, [image], correct=False, progress=False)
    state = model.state_dict()
    del state["quant_add.other_quantizer.amax"]
    twin = copy.deepcopy(model)
    twin.quant_add.input_quantizer.set_amax(9.0)
    twin.load_state_dict(state, strict=True)
    assert torch.equal(twin(image), model(image))


AFFINE = QuantDescriptor(unsigned=True, symmetric=False)


def lost_scales(count: int, descriptor: QuantDescriptor = QuantDescriptor()) -> Tensor:  # noqa: B008
    """Return scales that the range of their outermost codes gives back a last bit off."""
    scale = torch.rand(4000, generator=torch.Generator().manual_seed(0)) / 10 + 1e-3
    qparams = QParams(scale, torch.full_like(scale, 7), descriptor.format)
    actual = Range.of_qparams(qparams, symmetric=descriptor.symmetric).qparams(
        descriptor.format
    )
    lost = scale[actual.scale != scale]
    return lost[:count]


def held(
    descriptor: QuantDescriptor, scale: Tensor, point: Any = None
) -> TensorQuantizer:
    q = TensorQuantizer(descriptor)
    q.set_qparams(scale, point)
    return q


def network() -> nn.Sequential:
    """Return a quantized product whose scales no range gives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6))
    recipe = torchq.recipes.int8(symmetric=False)
    torchq.quantize_(model, recipe, progress=False)
    scales = lost_scales(7)
    model[0].input_quantizer.set_qparams(
        scales[0],
        3 if _starts_at_zero(model) else -5,
    )
    model[0].weight_quantizer.set_qparams(scales[1:].view(6, 1))
    return model


def _starts_at_zero(model: Any) -> bool:
    return model[0].input_quantizer.descriptor.unsigned is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("point", [None, 7])
def test_calls_use_exactly_the_scale(point: int | None, dtype: torch.dtype) -> None:
    x = (torch.randn(500, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    descriptor = QuantDescriptor() if point is None else AFFINE
    for scale in lost_scales(20, descriptor):
        q = held(descriptor, scale, point)
        low, high = (-128, 127) if point is None else (-point, 255 - point)
        working = torch.float64 if dtype is torch.float64 else torch.float32
        codes = (x.to(working) / scale.to(working)).round().clamp(low, high)
        assert torch.equal(
            q(x),
            (codes * scale).to(dtype),
        )
        assert torch.equal(
            q.codes(x),
            codes + (point or 0),
        )
        assert torch.equal(q.scale, scale)
        assert int(q.calculate_qparams()[1]) == (point or 0)
        ends = q.range.map(float)
        assert ends.high == pytest.approx(high * float(scale))
        assert ends.low == (
            None if point is None else pytest.approx(-point * float(scale))
        )


def test_channels_and_blocks_and_float_formats() -> None:
    scales = lost_scales(6)
    w = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    q = held(
        QuantDescriptor(axis=0),
        scales.view(6, 1),
    )
    assert torch.equal(
        q(w), (w / scales[:, None]).round().clamp(-128, 127) * scales[:, None]
    )
    blocks = held(
        QuantDescriptor(4, block_size=2),
        scales.view(6, 1).expand(6, 2),
    )
    wide = scales[:, None]
    assert torch.equal(
        blocks(w),
        (w / wide).round().clamp(-8, 7) * wide,
    )
    fp8 = held(QuantDescriptor((4, 3)), scales[0])
    x = (w * 9).requires_grad_()
    y = fp8(x)
    codes = (x.detach() / scales[0]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(y, codes * scales[0])
    y.sum().backward()
    assert torch.equal(x.grad, (x.detach().abs() <= 448 * scales[0]).float())


@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated:FutureWarning")
def test_gradients_pass_inside_and_compiled_code_agrees() -> None:
    q = held(AFFINE, lost_scales(1), 7).eval()
    x = torch.linspace(-3, 30, 200).requires_grad_()
    q(x).sum().backward()
    v = x.detach() / q.scale
    assert torch.equal(x.grad, ((v >= -7) & (v <= 248)).float())
    torch._dynamo.reset()
    compiled = torch.compile(q, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), q(x))
    assert torch.equal(
        torch.export.export(q, (x,)).module()(x),
        q(x),
    )
    assert torch.equal(
        torch.jit.trace(q, x.detach())(x),
        q(x),
    )


def test_copies_checkpoints_and_casts_keep_the_scale(tmp_path: Path) -> None:
    model = network()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(
        nn.Sequential(nn.Linear(8, 6)),
        tmp_path / "m.pt",
    )
    assert torch.equal(loaded(x), expected)
    fresh = nn.Sequential(nn.Linear(8, 6))
    torchq.quantize_(fresh, torchq.recipes.int8(symmetric=False), progress=False)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), expected)
    assert set(fresh.state_dict()) == set(model.state_dict())
    scale = model[0].input_quantizer.scale
    assert torch.equal(copy.deepcopy(model).half()[0].input_quantizer.scale, scale)


def test_a_file_without_the_scale_ends_it(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(8, 6))
    torchq.quantize_(plain, torchq.recipes.int8(symmetric=False), progress=False)
    torchq.calibrate(plain, [torch.randn(5, 8)], progress=False)
    torchq.save(plain, tmp_path / "m.pt")
    for load in (
        lambda model: torchq.load(model, tmp_path / "m.pt"),
        lambda model: model.load_state_dict(plain.state_dict()),
    ):
        model = network()
        load(model)
        assert set(model.state_dict()) == set(plain.state_dict())
        x = torch.randn(5, 8)
        assert torch.equal(model(x), plain(x))
    model = network()
    # Floats leave it alone.
    model.load_state_dict(nn.Sequential(nn.Linear(8, 6)).state_dict())
    assert torch.equal(
        model[0].input_quantizer.scale,
        lost_scales(1)[0],
    )


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), [1.0, 2.0]], ids=str)
def test_damaged_files_are_refused(value: Any, tmp_path: Path) -> None:
    torchq.save(network(), tmp_path / "m.pt")
    file = torch.load(tmp_path / "m.pt", weights_only=True)
    file["state_dict"]["0.input_quantizer.held_scale"] = torch.tensor(value)
    torch.save(file, tmp_path / "m.pt")
    with pytest.raises(
        ConfigError, match=r"load: 0\.input_quantizer\.held_scale: .* is damaged"
    ):
        torchq.load(
            nn.Sequential(nn.Linear(8, 6)),
            tmp_path / "m.pt",
        )


@pytest.mark.parametrize("dynamo", [False, True])
def test_files_have_exactly_the_scale(dynamo: bool, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = network()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    torchq.export_onnx(model, x, tmp_path / "m.onnx", dynamo=dynamo)
    file = onnx.load(tmp_path / "m.onnx")
    stored = [onnx.numpy_helper.to_array(value) for value in file.graph.initializer]
    stored += [
        onnx.numpy_helper.to_array(node.attribute[0].t)
        for node in file.graph.node
        if node.op_type == "Constant"
    ]
    actual = {
        float(number)
        for value in stored
        if value.dtype == "float32"
        for number in value.flat
    }
    assert {float(scale) for scale in lost_scales(7)} <= actual
    assert torchq.verify_onnx(model, tmp_path / "m.onnx", [x], progress=False).ok
    read = torchq.from_onnx(tmp_path / "m.onnx")
    assert torch.equal(read(x), model(x))


def test_kernels_have_exactly_the_scale() -> None:
    model = network()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    layer: Any = next(
        m for m in torchq.deploy(model, x).modules() if hasattr(m, "weight_codes")
    )
    codes = (model[0].weight / lost_scales(7)[1:, None]).round().clamp(-128, 127)
    assert torch.equal(layer.weight_codes.float().reshape(6, 8), codes)
    assert torch.equal(
        layer.weight_scale.flatten(),
        lost_scales(7)[1:],
    )
    assert layer.input_qparams.scale == float(lost_scales(1))


def test_another_range_ends_it(tmp_path: Path) -> None:
    def changed(
        change: Any, descriptor: QuantDescriptor | None = None
    ) -> TensorQuantizer:
        q = held(
            descriptor or QuantDescriptor(),
            lost_scales(1)[0],
        )
        change(q)
        assert "held_scale" not in q.state_dict()
        return q

    assert changed(lambda q: q.set_amax(2.54)).scale == torch.tensor(2.54) / 127
    changed(lambda q: q.calibrate_on(torch.ones(3)))
    changed(lambda q: setattr(q, "amax", torch.tensor(1.0)))
    changed(lambda q: setattr(q, "range", Range(torch.tensor(1.0))))
    changed(
        lambda q: q.set_range(-1.0, 1.0),
        QuantDescriptor(symmetric=False),
    )
    assert not changed(lambda q: q.forget_amax()).calibrated


def test_learned_ranges_start_from_it() -> None:
    model = network().train()
    torchq.qat.learn_ranges_(model)
    assert not any("held" in key for key in model.state_dict())
    q = model[0].weight_quantizer
    torch.testing.assert_close(
        q.scale.flatten(),
        lost_scales(7)[1:],
    )
    model(torch.randn(5, 8)).sum().backward()
    assert q.amax.grad is not None


@pytest.mark.parametrize(
    ("descriptor", "arguments", "text"),
    [
        (
            QuantDescriptor(learn_amax=True),
            (1.0,),
            "expected a descriptor without learn_amax",
        ),
        (
            QuantDescriptor(dynamic=True),
            (1.0,),
            "expected a descriptor without learn_amax",
        ),
        (
            QuantDescriptor(scale_amax=0.5),
            (1.0,),
            "expected a descriptor without learn_amax",
        ),
        (
            QuantDescriptor(power_of_two=True),
            (1.0,),
            "expected a descriptor without learn_amax",
        ),
        (
            QuantDescriptor(),
            ([1.0, 2.0],),
            r"a scale of shape \(2,\) .* one element per tensor",
        ),
        (AFFINE, ([1.0], [1, 2]), r"a zero point of shape \(2,\)"),
        (
            AFFINE,
            (1.0, 256),
            "zero points from 256 to 256 .* expected whole numbers from 0 to 255",
        ),
        (
            QuantDescriptor(),
            (1.0, 1),
            "zero points from 1 to 1 .* whole numbers from 0 to 0",
        ),
        (AFFINE, (1.0, 1.5), "zero points from 1.5 to 1.5"),
        (
            QuantDescriptor(),
            (0.0,),
            "expected normal numbers > 0 whose range fits float32",
        ),
        (
            QuantDescriptor(),
            (1e-40,),
            "expected normal numbers > 0 whose range fits float32",
        ),
        (
            QuantDescriptor(),
            (3e38,),
            "expected normal numbers > 0 whose range fits float32",
        ),
        (QuantDescriptor(), (-1.0,), "got scale -1.0; expected finite numbers >= 0"),
    ],
    ids=str,
)
def test_what_cannot_be_held(
    descriptor: QuantDescriptor, arguments: tuple[Any, ...], text: str
) -> None:
    q = TensorQuantizer(descriptor)
    with pytest.raises(ConfigError, match=text):
        q.set_qparams(*arguments)
    assert not q.calibrated
    assert "held_scale" not in q.state_dict()
