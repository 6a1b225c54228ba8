"""``unsigned="auto"``: calibration chooses unsigned codes if and only if it sees no negative."""

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import Parts, simulated
from torchq import QuantDescriptor, Rule
from torchq.calib import methods
from torchq.errors import ConfigError
from torchq.formats import INT4, UINT4
from torchq.nn import TensorQuantizer

AUTO = QuantDescriptor(4, unsigned="auto")


def calibrated(*batches: Tensor, method: str | None = None) -> TensorQuantizer:
    quantizer = TensorQuantizer(AUTO)
    quantizer.start_calibration(method)
    for batch in batches:
        quantizer.observe(batch)
    quantizer.finish_calibration()
    return quantizer


def net() -> nn.Sequential:
    """Return a net whose second layer has an input without negative values, the others do not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    ).eval()


def quantized(model: nn.Module, generator: torch.Generator) -> nn.Module:
    torchq.quantize_(model, torchq.recipes.integer(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torchq.calibrate(
            model, [torch.randn(64, 6, generator=generator)], progress=False
        )
    return model


def signs(model: nn.Module) -> list[object]:
    layers = [m for m in model.modules() if isinstance(m, torchq.nn.QuantLinear)]
    return [layer.input_quantizer.descriptor.unsigned for layer in layers]


@pytest.mark.parametrize("method", methods())
def test_one_negative_value_decides(method: str, generator: torch.Generator) -> None:
    positive = torch.rand(4000, generator=generator)
    unsigned = calibrated(
        positive,
        torch.zeros(5),
        -torch.zeros(5),
        method=method,
    )
    assert unsigned.descriptor == AUTO.replace(unsigned=True)
    assert unsigned.given_descriptor == AUTO
    assert unsigned.descriptor.format == UINT4
    signed = calibrated(positive, torch.tensor([-1e-30]), method=method)
    assert signed.descriptor == AUTO.replace(unsigned=False)
    assert signed.descriptor.format == INT4


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize("unsigned", [True, False])
def test_the_range_is_that_of_the_chosen_format(
    method: str, unsigned: bool, generator: torch.Generator
) -> None:
    x = torch.randn(4000, generator=generator)
    x = x.relu() if unsigned else x
    known = TensorQuantizer(QuantDescriptor(4, unsigned=unsigned))
    known.start_calibration(method)
    known.observe(x)
    known.finish_calibration()
    chosen = calibrated(x, method=method)
    assert torch.equal(chosen.amax, known.amax)
    assert torch.equal(chosen(x), known(x))


def test_until_calibration_the_codes_are_signed() -> None:
    quantizer = TensorQuantizer(AUTO)
    x = torch.tensor([-1.0, 0.5])
    assert torch.equal(
        quantizer(x),
        TensorQuantizer(QuantDescriptor(4))(x),
    )
    quantizer.set_amax(1.0)
    assert quantizer.descriptor == AUTO
    assert int(quantizer.unsigned) == -1


def test_a_new_calibration_chooses_again() -> None:
    quantizer = calibrated(torch.ones(3))
    for x, unsigned in ((-torch.ones(3), False), (torch.ones(3), True)):
        quantizer.start_calibration()
        quantizer.observe(x)
        quantizer.finish_calibration()
        assert quantizer.descriptor.unsigned is unsigned
    quantizer.forget_amax()
    assert quantizer.descriptor == AUTO
    assert int(quantizer.unsigned) == -1


def test_only_an_undecided_descriptor_takes_a_choice() -> None:
    quantizer = TensorQuantizer(AUTO)
    quantizer.set_unsigned(True)
    assert quantizer.descriptor == AUTO.replace(unsigned=True)
    with pytest.raises(
        ConfigError, match="got set_unsigned for int8 per-tensor max; expected a"
    ):
        TensorQuantizer(QuantDescriptor()).set_unsigned(True)


def test_a_model_chooses_layer_by_layer(generator: torch.Generator) -> None:
    model = quantized(net(), generator)
    assert signs(model) == [False, True, False]
    assert "uint4 per-tensor" in str(torchq.summary(model))
    x = torch.randn(5, 6, generator=generator)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        model.half().float(),
    ):
        assert signs(twin) == [False, True, False]
    assert torch.equal(twin(x), model(x))


def test_state_dicts_carry_the_choice(generator: torch.Generator) -> None:
    model = quantized(net(), generator)
    fresh = net()
    torchq.quantize_(fresh, torchq.recipes.integer(4, 4))
    assert signs(fresh) == ["auto"] * 3
    state = model.state_dict()
    fresh.load_state_dict(state)
    x = torch.randn(5, 6, generator=generator)
    assert signs(fresh) == [False, True, False]
    assert torch.equal(fresh(x), model(x))
    del state["2.input_quantizer.unsigned"]
    with pytest.raises(
        RuntimeError, match=r'Missing key.*"2\.input_quantizer\.unsigned"'
    ):
        fresh.load_state_dict(state)
    state["2.input_quantizer.unsigned"] = torch.tensor(7, dtype=torch.int8)
    with pytest.raises(
        RuntimeError, match=r"2\.input_quantizer\.unsigned: got 7; expected -1, 0"
    ):
        fresh.load_state_dict(state)
    fixed = net()
    torchq.quantize_(fixed, torchq.recipes.integer(4, 4, unsigned=False))
    with pytest.raises(
        RuntimeError, match=r'Unexpected key.*"2\.input_quantizer\.unsigned"'
    ):
        fixed.load_state_dict(model.state_dict())
    floats = {key: value for key, value in state.items() if "quantizer" not in key}
    fresh.load_state_dict(floats)


def test_files_carry_the_choice(tmp_path: Path, generator: torch.Generator) -> None:
    model = quantized(net(), generator)
    torchq.save(model, tmp_path / "model.pt")
    x = torch.randn(5, 6, generator=generator)
    loaded = torchq.load(net(), tmp_path / "model.pt")
    assert signs(loaded) == [False, True, False]
    assert torch.equal(loaded(x), model(x))
    other = net()
    torchq.quantize_(other)
    assert torch.equal(
        torchq.load(other, tmp_path / "model.pt")(x),
        model(x),
    )
    data = torch.load(tmp_path / "model.pt", weights_only=True)
    data["state_dict"]["2.input_quantizer.unsigned"] = torch.tensor(
        77, dtype=torch.int8
    )
    torch.save(data, tmp_path / "bad.pt")
    with pytest.raises(ConfigError, match=r"unsigned: got \[77\]; expected -1, 0 or 1"):
        torchq.load(net(), tmp_path / "bad.pt")


def test_the_choice_is_exported(tmp_path: Path, generator: torch.Generator) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model = quantized(net(), generator)
    x = torch.randn(32, 6, generator=generator)
    torchq.export_onnx(model, x, tmp_path / "model.onnx", dynamo=False)
    kinds = {
        tensor.data_type
        for tensor in onnx.load(str(tmp_path / "model.onnx")).graph.initializer
        if tensor.data_type in (onnx.TensorProto.UINT8, onnx.TensorProto.INT8)
    }
    assert onnx.TensorProto.UINT8 in kinds
    assert torchq.verify_onnx(model, tmp_path / "model.onnx", [x]).ok


def test_quantizers_that_share_a_range_choose_together(
    generator: torch.Generator,
) -> None:
    class Sum(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x).relu() + self.b(x))

    torch.manual_seed(0)
    model = Sum(a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4)).eval()
    x = torch.randn(16, 4, generator=generator)
    config = torchq.QuantConfig(
        (Rule("*", input=AUTO, weight=QuantDescriptor(4, axis=0)),)
    )
    simulated(model, [x], config, target="onnxruntime", example=x)
    shared = torchq.nn.shared_groups(model)
    quantizers = dict(model.named_modules(remove_duplicate=False))
    for paths in shared:
        assert len({quantizers[path].descriptor.unsigned for path in paths}) == 1
    decided = [
        q
        for q in model.modules()
        if isinstance(q, TensorQuantizer) and "unsigned" in q._buffers
    ]
    assert decided
    assert all(isinstance(q.descriptor.unsigned, bool) for q in decided)


def test_the_report_of_calibration_says_which_sign_was_chosen() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    )
    torchq.quantize_(model, torchq.recipes.integer(4, 4))
    report = torchq.calibrate(
        model, [torch.linspace(-1, 1, 32).view(8, 4)], progress=False
    )
    assert report.signs == {
        "0.input_quantizer": "signed",
        "2.input_quantizer": "unsigned",
    }
    assert "(unsigned)" in str(report)


def test_a_state_with_signed_codes_is_refused_where_the_plan_fixed_unsigned_ones() -> (
    None
):
    quantizer = calibrated(torch.rand(8))
    state = quantizer.state_dict()
    quantizer.keep_unsigned()
    quantizer.load_state_dict(state)
    state["unsigned"] = torch.tensor(0, dtype=torch.int8)
    with pytest.raises(
        RuntimeError, match="unsigned: got 0; expected 1, which the plan has fixed"
    ):
        quantizer.load_state_dict(state)
    assert quantizer.unsigned == 1
