"""Rules with a position select the first or last layer with a quantized weight."""

import pytest
from torch import nn

import torchq
from torchq import QuantConfig, QuantDescriptor, Rule, recipes
from torchq.errors import ConfigError

EIGHT, FOUR = QuantDescriptor(8), QuantDescriptor(4)


def net() -> nn.Module:
    convs = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)
    return nn.Sequential(nn.AvgPool2d(2), *convs, nn.Flatten(), nn.Linear(4, 2))


def widths(report: torchq.swap.Plan) -> dict[str, tuple[int, str | None]]:
    return {d.name: (d.weight.num_bits, d.by) for d in report.replaced if d.weight is not None}


def test_ends_keep_eight_bits_and_the_report_says_why() -> None:
    report = torchq.plan(net(), recipes.integer(4, 4, first_last=8))
    assert widths(report) == {
        "1": (8, "1 (first layer)"),
        "3": (4, "type:torch.nn.modules.conv.Conv[123]d"),
        "5": (8, "5 (last layer)"),
    }


def test_excluding_the_last_layer_makes_no_other_the_last() -> None:
    report = torchq.plan(net(), recipes.integer(4, 4, first_last=8), exclude="5")
    assert {name: bits for name, (bits, _) in widths(report).items()} == {"1": 8, "3": 4}


def test_one_layer_is_first_and_last() -> None:
    report = torchq.plan(nn.Linear(2, 2), recipes.integer(4, 4, first_last=8))
    assert [(d.name, d.by) for d in report.replaced] == [("", "re:^$ (last layer)")]


def test_names_with_wildcards_are_meant_literally() -> None:
    model = nn.Module()
    for name in ("a[b]", "ab", "c"):
        model.add_module(name, nn.Linear(2, 2))
    report = torchq.plan(model, recipes.integer(4, 4, first_last=8))
    found = {name: bits for name, (bits, _) in widths(report).items()}
    assert found == {"a[b]": 8, "ab": 4, "c": 8}


def test_a_rule_must_match_its_layer_unless_it_is_optional() -> None:
    general = Rule("*", weight=FOUR)
    required = Rule(nn.Linear, weight=EIGHT, position="first")
    text = r"Linear \(first layer\): the first layer is 1; expected one that it"
    with pytest.raises(ConfigError, match=text):
        torchq.plan(net(), QuantConfig((general, required)))
    optional = Rule(nn.Linear, weight=EIGHT, position="first", optional=True)
    report = torchq.plan(net(), QuantConfig((general, optional)))
    assert {bits for bits, _ in widths(report).values()} == {4}
    with pytest.raises(ConfigError, match="the last layer is none; expected one that it matches"):
        torchq.plan(nn.ReLU(), QuantConfig((general, Rule("*", weight=EIGHT, position="last"))))


def test_patch_refuses_what_needs_the_whole_model() -> None:
    with pytest.raises(ConfigError, match=r"patch: rule .*first layer.*: needs the whole model"):
        torchq.patch(recipes.w4a4())
    with torchq.patch(recipes.w4a4(first_last=None)):
        model = nn.Sequential(nn.Linear(2, 2))
    assert model[0].weight_quantizer.descriptor.num_bits == 4
