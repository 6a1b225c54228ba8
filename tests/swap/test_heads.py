"""What makes boxes and scores of a detector's last maps stays float; others have no head."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq import Rule
from torchq.swap.heads import BY

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TARGETS = ["onnxruntime", "openvino", "executorch"]


def block(inputs: int, outputs: int, stride: int = 2) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1),
        nn.SiLU(),
    )


class Levels(nn.Module):
    """A backbone with maps of three sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 8)
        self.downs = nn.ModuleList([block(8, 8), block(8, 8), block(8, 8)])

    def forward(self, x: Tensor) -> list[Tensor]:
        x, maps = self.stem(x), []
        for down in self.downs:
            x = down(x)
            maps.append(x)
        return maps


class Ssd(nn.Module):
    """Boxes and scores of each level as rows, returned side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = Levels()
        self.boxes = nn.ModuleList([nn.Conv2d(8, 8, 3, 1, 1) for _ in range(3)])
        self.scores = nn.ModuleList([nn.Conv2d(8, 6, 3, 1, 1) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        boxes = []
        scores = []
        for b, s, m in zip(self.boxes, self.scores, self.levels(x), strict=True):
            boxes.append(b(m).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4))
            scores.append(s(m).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 3))
        return torch.cat(boxes, 1), torch.cat(scores, 1).softmax(-1)


class Distances(nn.Module):
    """Boxes from distributions of distances, joined with the scores, as YOLOv8 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = Levels()
        self.boxes = nn.ModuleList([nn.Conv2d(8, 16, 1) for _ in range(3)])
        self.scores = nn.ModuleList([nn.Conv2d(8, 3, 1) for _ in range(3)])
        self.sums = nn.Conv2d(4, 1, 1, bias=False).requires_grad_(False)
        self.sums.weight.copy_(torch.arange(4.0).view(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.boxes, self.scores, self.levels(x), strict=True)
        joined = [torch.cat((b(m), s(m)), 1) for b, s, m in parts]
        rows = torch.cat([j.view(x.shape[0], 19, -1) for j in joined], 2)
        boxes, scores = rows.split((16, 3), 1)
        steps = boxes.view(x.shape[0], 4, 4, -1).transpose(2, 1).softmax(1)
        actual = self.sums(steps).view(x.shape[0], 4, -1)
        low, high = actual.chunk(2, 1)
        return torch.cat(
            (torch.cat((low + high, high - low), 1) * 8.0, scores.sigmoid()), 1
        )


class OneHead(nn.Module):
    """The layers of one head, called for each level, as in FCOS."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = Levels()
        self.boxes = nn.Conv2d(8, 4, 3, 1, 1)
        self.scores = nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        actual = [
            torch.cat(
                (self.boxes(m).exp().flatten(2), self.scores(m).sigmoid().flatten(2)), 1
            )
            for m in self.levels(x)
        ]
        return torch.cat(actual, 2)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 8)
        self.a = block(8, 8, 1)
        self.b = block(8, 8, 1)
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([self.a(x) + x, self.b(x)], 1)
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Features(Classifier):
    """The same without its last layer: pooled, so that no position is left."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Identity()  # type: ignore[assignment]


class UNet(nn.Module):
    """Maps of two sizes, each with classes for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = block(3, 8)
        self.deep = block(8, 8)
        self.up = block(16, 8, 1)
        self.classes = nn.Conv2d(8, 2, 1)
        self.coarse = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = self.down(x)
        deep = self.deep(skip)
        x = self.up(torch.cat([skip, F.interpolate(deep, scale_factor=2)], 1))
        return self.classes(x), F.interpolate(self.coarse(deep), scale_factor=2)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 32)
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        shares = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        x = x + shares @ self.value(x)
        return x + self.out(F.gelu(self.wide(self.norm(x))))


def in_float(model: nn.Module, target: str | None, *rules: Rule) -> set[str]:
    config = torchq.recipes.int8().with_rules(*rules)
    plan = torchq.plan(model.eval(), config, target=target, example=X)
    return {d.name for d in plan.skipped if d.by == BY}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cls", [Ssd, Distances, OneHead])
def test_what_makes_boxes_of_maps_stays_float(
    cls: type[nn.Module], target: str
) -> None:
    model = cls().eval()
    plan = torchq.plan(model, target=target, example=X)
    behind = [d for d in plan.operator_rows() if not d.name.startswith("levels.")]
    assert [d.name for d in behind] == []
    assert any(d.by == BY and "Cat" in d.cls for d in plan.skipped)
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    last = [name for name in layers if name.startswith(("boxes", "scores"))]
    assert last
    # The last layers that are most of the work are quantized, and their results are not.
    decisions = [d for d in plan.decisions if d.name in last]
    quantized = [d for d in decisions if d.by != BY]
    assert quantized
    assert all(d.weight is not None for d in quantized)
    assert all(d.output is None for d in decisions)
    assert BY in plan.explain(next(d.name for d in plan.skipped if d.by == BY))


def test_a_convolution_of_probabilities_stays_float() -> None:
    assert "sums" in in_float(Distances(), None)
    assert "sums" in in_float(Distances(), "openvino")


@pytest.mark.sample(8)
@pytest.mark.parametrize("target", [None, *TARGETS])
@pytest.mark.parametrize("cls", [Classifier, Features, UNet, Encoder])
def test_other_networks_have_no_such_head(
    cls: type[nn.Module], target: str | None
) -> None:
    assert in_float(cls(), target) == set()


def test_a_rule_of_the_user_counts() -> None:
    rule: Any = Rule(
        "sums", input=torchq.QuantDescriptor(), weight=torchq.QuantDescriptor(axis=0)
    )
    assert "sums" not in in_float(Distances(), "openvino", rule)
    joined = Rule("quant_cat*", input=torchq.QuantDescriptor())
    actual = in_float(Distances(), "openvino", joined)
    assert actual
    assert not any(name.startswith("quant_cat") for name in actual)


class Wide(nn.Module):
    """A head whose last layers are a small part of the network's work."""

    def __init__(self, kind: type[nn.Module] = Ssd) -> None:
        super().__init__()
        self.head = kind()
        self.head.levels.stem = nn.Sequential(
            block(3, 256, 1),
            block(256, 8),
        )

    def forward(self, x: Tensor) -> Any:
        return self.head(x)


def last_layers(model: nn.Module) -> set[str]:
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    return {name for name in names if name.startswith(("head.boxes", "head.scores"))}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cls", [Ssd, Distances])
def test_last_bare_convolutions_of_a_detector_stay_float(
    cls: type[nn.Module], target: str
) -> None:
    model = Wide(cls).eval()
    plan = torchq.plan(model, target=target, example=X)
    expected = last_layers(model)
    assert {d.name for d in plan.skipped if d.name in expected} == expected
    assert "of the multiply-adds" in plan.explain(min(expected))
    # The layers in front of them run on integers still.
    downs = [d for d in plan.replaced if d.name.startswith("head.levels.downs")]
    assert downs
    assert all(d.weight is not None for d in downs if "Conv" in d.cls)


def float_last_layers(model: nn.Module, **options: Any) -> set[str]:
    plan = torchq.plan(model.eval(), target="onnxruntime", example=X, **options)
    return {d.name for d in plan.skipped if d.by == BY}


def test_last_layers_that_are_no_small_part_are_quantized() -> None:
    plan = torchq.plan(Ssd().eval(), target="onnxruntime", example=X)
    assert plan.decision("boxes.0").weight is not None


def test_of_last_layers_that_are_a_large_part_the_small_ones_stay_float() -> None:
    model = Wide()
    # The scores of many classes are most of the work, as in SSD and RetinaNet.
    model.head.scores = nn.ModuleList(nn.Conv2d(8, 900, 1) for _ in range(3))
    in_float = float_last_layers(model)
    assert {"head.boxes.0", "head.boxes.1"} <= in_float
    assert "head.scores.0" not in in_float
    plan = torchq.plan(model, target="onnxruntime", example=X)
    work = plan.work
    assert work is not None
    part = sum(work.amounts.get(name, 0.0) for name in in_float)
    assert part <= 0.03 * sum(work.amounts.values())


class TwoHeads(nn.Module):
    """A network whose first head is for training alone, as that of YOLOv10 and YOLO26."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = Levels()
        self.for_training = nn.ModuleList(nn.Conv2d(8, 200, 1) for _ in range(3))
        self.boxes = nn.ModuleList(nn.Conv2d(8, 200, 1) for _ in range(3))
        self.levels.stem = nn.Sequential(
            block(3, 128, 1),
            block(128, 8),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.levels(x)
        raw = [
            torch.cat(
                [conv(m).flatten(2) for conv, m in zip(head, maps, strict=True)], 2
            )
            for head in (self.for_training, self.boxes)
        ]
        return raw[0], raw[1].sigmoid()


def test_last_layers_for_the_loss_come_behind_those_of_the_answers() -> None:
    in_float = float_last_layers(TwoHeads())
    assert "boxes.0" in in_float
    assert "for_training.0" not in in_float


def test_an_activation_makes_a_last_layer_no_bare_one() -> None:
    model = Wide(OneHead).eval()
    plan = torchq.plan(model, target="onnxruntime", example=X)
    assert all(plan.decision(name).weight is not None for name in last_layers(model))


@pytest.mark.parametrize("target", ["qnn", "rknn", None])
def test_integer_chips_and_no_target_quantize_last_layers(target: str | None) -> None:
    model = Wide().eval()
    plan = torchq.plan(model, target=target, example=X)
    assert all(plan.decision(name).weight is not None for name in last_layers(model))


def test_a_rule_for_a_last_layer_counts() -> None:
    rule: Any = Rule(
        "head.boxes.*",
        input=torchq.QuantDescriptor(),
        weight=torchq.QuantDescriptor(axis=0),
    )
    config = torchq.recipes.int8().with_rules(rule)
    plan = torchq.plan(Wide().eval(), config, target="onnxruntime", example=X)
    assert plan.decision("head.boxes.0").weight is not None
    assert plan.decision("head.scores.0").reason


def test_a_last_layer_that_is_included_by_its_path_is_quantized() -> None:
    name = "head.boxes.0"
    included = float_last_layers(Wide(), include=[name, "head.levels.*"])
    assert name not in included
    # A pattern of several paths names the part that may be quantized, no layer.
    assert name in float_last_layers(Wide(), include=["head.*"])


def test_a_share_that_no_percentage_shows_is_called_little() -> None:
    model = Wide()
    model.head.levels.stem = nn.Sequential(
        block(3, 2048, 1),
        block(2048, 8),
    )
    model.head.boxes = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(3))
    model.head.scores = nn.ModuleList(nn.Conv2d(8, 3, 1) for _ in range(3))
    plan = torchq.plan(model.eval(), target="onnxruntime", example=X)
    assert "for little of the multiply-adds" in plan.explain("head.boxes.0")
