"""A plan is a value: what is planned, carried out, reported, stored and loaded is the same."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.models import Conv1D, ConvNet, Projection, SamePadConv2d, StagedNet
from tests.swap.test_grids import Mixed
from tests.swap.test_heads import Distances
from torchq.nn import TensorQuantizer
from torchq.swap import Plan, apply_, plan_of
from torchq.swap.apply import quantizer_slots


class Stem(nn.Module):
    """Results that are read in float, and both kinds of ranges.

    One activation stands in two places, one layer has two names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.act = nn.SiLU()
        self.wise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.left = nn.Conv2d(16, 8, 1)
        self.right = nn.Conv2d(16, 8, 1)
        self.inner = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), self.act)
        self.again = self.right
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.wise(self.act(self.first(x))))
        x = torch.cat([self.left(x).relu(), 40 * self.again(x)], 1)
        x = self.inner(F.max_pool2d(x, 2))
        return torch.tanh(self.last(x)) * torch.sigmoid(
            x.mean((2, 3), keepdim=True)[:, :4]
        )


class Branching(nn.Module):
    """A forward that cannot be traced, with a weight of its own, and a quantizer of its author."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 3, 3, 3) * 0.2)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 5)
        self.own = TensorQuantizer(torchq.QuantDescriptor(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(F.relu(F.conv2d(x, self.kernel, padding=1)))
        y = y + self.conv(y) if y.sum() > 0 else y - self.conv(y)
        return F.linear(y.mean((2, 3)), self.fc.weight, self.fc.bias)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(
        encoder,
        Conv1D(5, 8),
        nn.Linear(5, 5),
        Projection(),
    )


def fused() -> nn.Module:
    model = ConvNet().eval()
    torchq.fuse_(model, IMAGE)
    return model


IMAGE = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "stem": (Stem, IMAGE),
    "branching": (Branching, IMAGE),
    "staged": (StagedNet, IMAGE),
    "fused": (fused, IMAGE),
    "own padding": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), SamePadConv2d(8, 8, 3)),
        IMAGE,
    ),
    "transformer": (transformer, ROWS),
    "grids": (Mixed, IMAGE[..., :8, :8]),  # attention over each pixel
    "detector": (Distances, IMAGE),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(8, 4, 2, bidirectional=True)), ROWS),
}
ZOO = (
    "resnet18",
    "mobilenet_v3_small",
    "densenet121",
    "squeezenet1_1",
    "shufflenet_v2_x0_5",
)


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name not in ZOO:
        make, x = NETWORKS[name]
        return make().eval(), x
    models = pytest.importorskip("torchvision.models")
    # Its blocks with fewer layers: a concatenation in front of each layer is what it is here for.
    if name == "densenet121":
        model = models.DenseNet(block_config=(2, 4, 3, 2), num_classes=4)
    else:
        model = models.get_model(name, weights=None, num_classes=4)
    return model.eval(), torch.randn(1, 3, 64, 64)


SMALL = [
    pytest.param(name, target, has_example, id=f"{name}-{target}-{has_example}")
    for name in NETWORKS
    for target in (None, "onnxruntime", "openvino")
    for has_example in (False, True)
]
SMALL += [
    pytest.param(name, "tensorrt", True, id=f"{name}-tensorrt") for name in NETWORKS
]
LARGE = [pytest.param(name, "onnxruntime", True, id=name) for name in ZOO[:1]]
SLOW = [
    pytest.param(name, "onnxruntime", True, id=name, marks=pytest.mark.slow)
    for name in ZOO[1:]
]


def check_grids(model: nn.Module, plan: Plan) -> None:
    """Check that quantizers and layers have the codes and biases that a plan names."""
    kept = {p: q for p, q in quantizer_slots(model) if q.keeps_sign}
    fitted = {d.name for d in plan.replaced if d.input and not d.input.symmetric}
    for sign in (True, False):
        slots = {
            f"{n}.{s}_quantizer"
            for d in plan.replaced
            for n in d.names
            for s in (d.unsigned if sign else d.signed)
            if sign or d.name in fitted
        }
        actual = {p for p, q in kept.items() if q.descriptor.unsigned is sign}
        assert actual == slots
    for decision in plan.replaced:
        module = model.get_submodule(decision.name)
        marks = (getattr(module, "bias_format", ""), getattr(module, "rounded_by", ""))
        if decision.awaits_fold:
            assert marks == ("", "")
            marks = module.after_fold
        assert marks == (decision.bias, decision.rounded_by)


@pytest.mark.sample(24)
@pytest.mark.filterwarnings("ignore:.*only .* quantized")
@pytest.mark.parametrize(
    ("name", "target", "has_example"),
    [*SMALL, *LARGE, *SLOW],
)
def test_plan_report_copy_file_and_loaded_model_agree(
    name: str, target: str | None, has_example: bool, tmp_path: Path
) -> None:
    model, x = made(name)
    config = torchq.recipes.int8(recurrent=True)
    options = {"target": target, "example": x if has_example else None}
    before = {key: type(module) for key, module in model.named_modules()}
    planned = torchq.plan(model, config, **options)
    assert {key: type(module) for key, module in model.named_modules()} == before
    fresh = copy.deepcopy(model)
    report = torchq.quantize_(model, config, **options, progress=False)
    assert planned == report == plan_of(model)
    assert planned == Plan.from_dict(json.loads(json.dumps(planned.to_dict())))
    assert (
        planned == pickle.loads(pickle.dumps(planned)) == plan_of(copy.deepcopy(model))
    )
    if target is not None and has_example:
        check_grids(model, report)
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(copy.deepcopy(fresh), tmp_path / "m.pt")
    assert plan_of(loaded) == report
    if name in NETWORKS:
        apply_(fresh, planned)
        with torch.no_grad():
            results = [m(x) for m in (model, loaded, fresh)]
        for other in results[1:]:
            torch.testing.assert_close(
                other, results[0], rtol=0, atol=0, equal_nan=True
            )
        assert torchq.restore_(fresh)
        assert plan_of(fresh).decisions == ()


def test_the_networks_show_every_kind_of_decision() -> None:
    """Otherwise the plans above could agree on nothing."""
    model, x = made("stem")
    plan = torchq.plan(model, target="onnxruntime", example=x)
    assert plan.decision("last").output is not None
    assert plan.decision("quant_cat").unsigned == ("input",)  # the one behind a ReLU
    assert {d.name for d in plan.replaced if d.bias} == {
        *("first", "wise", "left", "right", "inner.0", "last")
    }
    assert plan.decision("quant_cat").ranges == 2
    assert plan.shared
    assert plan.decision("again").names == ("right", "again")
    assert plan.operators[""].sites
    assert {d.name for d in plan.replaced} >= {"inner.1"}
    assert "act" not in plan.modes
    assert (
        "0.layers.0.self_attn.softmax_quantizer"
        in torchq.plan(made("transformer")[0]).modes
    )
    model, x = made("branching")
    plan = torchq.plan(model, target="onnxruntime", example=x)
    assert plan.decision("kernel_call").input is not None
    assert set(plan.placed) == {"own"}
    assert plan.share is not None
    assert plan.work is not None
    assert plan.work.measured


@pytest.mark.parametrize("name", ["stem", "branching", "transformer"])
@pytest.mark.parametrize("check", [False, True])
def test_two_runs_decide_everything_and_two_compare(name: str, check: bool) -> None:
    model, x = made(name)
    calls: list[nn.Module] = []
    model.register_forward_pre_hook(lambda module, _: calls.append(module))
    torchq.quantize_(
        model, target="onnxruntime", example=x, check=check, progress=False
    )
    assert len(calls) == (4 if check else 2)


def test_a_model_that_was_changed_by_hand_has_the_plan_of_what_it_is(
    tmp_path: Path,
) -> None:
    model, x = made("staged")
    report = torchq.quantize_(model, exclude="head.0", example=x)
    model.stem.input_quantizer.mode = "off"
    torchq.nn.revert_(model.layer4.conv)
    now = plan_of(model)
    assert now.modes == {"stem.input_quantizer": "off"}
    assert now.decision("layer4.conv") is None
    assert now.decision("stem") == report.decision("stem")
    assert now.decision("head.0").reason == "excluded"
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(
        made("staged")[0],
        tmp_path / "m.pt",
    )
    assert plan_of(loaded) == now
    assert torch.equal(loaded(x), model(x))


def test_parts_that_were_quantized_one_by_one_keep_their_reasons() -> None:
    model, _ = made("staged")
    torchq.quantize_(model.layer4, exclude="downsample.0")
    torchq.quantize_(model.head)
    plan = plan_of(model)
    assert plan.decision("layer4.downsample.0").reason == "excluded"
    assert plan.decision("head.0").by == "type:torch.nn.modules.linear.Linear"


def test_explain_says_who_decided_what_and_why() -> None:
    model, x = made("stem")
    plan = torchq.plan(model, target="onnxruntime", example=x, exclude="last")
    assert "excluded; decided by last" in plan.explain("last")
    assert plan.verdict().endswith("; evaluation computes the codes of onnxruntime")
    other = torchq.plan(model, target="openvino", example=x)
    assert other.verdict().endswith("; evaluation simulates")
    assert "evaluation" not in torchq.plan(model, example=x).verdict()
    assert "one range with" in plan.explain(plan.shared[0][0])
    assert plan.explain("nobody") == "nobody: nothing is decided about it"


def test_a_printed_plan_is_a_screen_that_names_every_exception() -> None:
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)) for _ in range(40)
    ]
    plan = torchq.plan(
        nn.Sequential(*blocks, nn.Linear(8, 2)),
        exclude=["3.0", "5.0"],
    )
    lines = str(plan).splitlines()
    assert len(lines) <= 25
    assert lines[-1] == plan.verdict() == plan.table().splitlines()[-1]
    message = " ".join(str(plan).split())
    assert "SKIPPED: excluded 2 Conv2d 3.0, 5.0" in message
    assert "SKIPPED: no rule matches 40 MaxPool2d" in message
    assert "plan.explain(path)" in message
    assert len(plan.table().splitlines()) > len(plan.decisions)
