"""plan: which modules, by which rule, and every reason why not."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import torchq
from tests.models import ConvNet, SamePadConv2d, image_batches
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import ConfigError
from torchq.swap.decisions import NOT_CALLED

INT8 = QuantDescriptor()
INT4 = QuantDescriptor(4)


class Net(nn.Module):
    """Two convolutions, a head of two layers, and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(
            nn.Linear(4, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def replaced(config: QuantConfig | None = None, **options: Any) -> list[str]:
    return [d.name for d in torchq.plan(Net(), config, **options).replaced]


ALL = ["stem", "body.0", "head.0", "head.1"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ALL),
        ({"include": "stem"}, ["stem"]),
        ({"include": ["stem", "head.*"]}, ["stem", "head.0", "head.1"]),
        ({"include": nn.Linear}, ["head.0", "head.1"]),
        ({"include": "type:Conv2d"}, ["stem", "body.0"]),
        ({"include": "re:^(stem|head)"}, ["stem", "head.0", "head.1"]),
        ({"include": lambda name, module: "0" in name}, ["body.0", "head.0"]),
        ({"exclude": "head.*"}, ["stem", "body.0"]),
        ({"exclude": ["stem", nn.Linear]}, ["body.0"]),
        ({"include": nn.Conv2d, "exclude": ["stem"]}, ["body.0"]),
    ],
)
def test_include_and_exclude(options: dict[str, Any], expected: list[str]) -> None:
    assert replaced(**options) == expected


def test_the_last_rule_that_matches_decides() -> None:
    rules = (
        Rule("*", input=INT8, weight=INT8),
        Rule("type:Linear", input=INT4, weight=INT4),
    )
    own = Rule("head.1", skip=True), Rule("re:^body", weight=INT4)
    report = torchq.plan(
        Net(),
        QuantConfig((*rules, *own)),
    )
    actual = {d.name: (d.by, d.input, d.weight, d.reason) for d in report.decisions}
    assert actual["stem"] == ("*", INT8, INT8, "")
    assert actual["head.0"] == ("type:Linear", INT4, INT4, "")
    assert actual["head.1"] == ("head.1", None, None, "excluded")
    assert actual["body.0"] == ("re:^body", None, INT4, "")
    without = "the rule has no descriptor for it"  # a pool has no weight
    assert actual["body.3"] == ("re:^body", None, None, without)
    assert [d.name for d in report.replaced] == ["stem", "body.0", "head.0"]


def test_a_pool_is_quantized_where_a_rule_says_so() -> None:
    config = torchq.recipes.int8().with_rules(
        Rule("type:MaxPool2d", input=INT8, weight=INT8)
    )
    pool = torchq.plan(Net(), config).decision("body.3")
    assert (pool.input, pool.weight) == (INT8, None)


BODY = QuantConfig((Rule("body.1", input=INT8),))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"exclude": "nope*"},
            r"Net: pattern 'nope\*' matches no .* could .*; candidates are s",
        ),
        ({"include": ["stem", "nope"]}, "pattern 'nope' matches no module"),
        (
            {"exclude": "head"},
            r"pattern 'head' matches .* For everything below it write 'head.*'",
        ),
        ({"exclude": ["a", "b"]}, "pattern 'a', 'b' matches no module"),
        ({"config": BODY}, "pattern 'body.1' matches no module"),
        (
            {"exclude": nn.Conv1d},
            "pattern 'type:torch.nn.modules.conv.Conv1d' matches no module",
        ),
        ({"exclude": ""}, "pattern: got an empty string"),
        ({"include": "re:("}, r"pattern 're:\(': not a regular expression"),
        (
            {"exclude": "*"},
            r"nothing to quantize \(.*stem: excluded.*\); expected at least one m",
        ),
        ({"config": QuantConfig(())}, r"nothing to quantize \(.*no rule matches"),
    ],
)
def test_patterns_that_select_nothing(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        torchq.plan(Net(), **options)


def test_a_model_without_layers_is_refused() -> None:
    message = r"Sequential: nothing to quantize \(it has no layer that torchq knows\)"
    with pytest.raises(ConfigError, match=message):
        torchq.plan(nn.Sequential(nn.ReLU()))


def test_an_optional_rule_may_match_nothing() -> None:
    config = torchq.recipes.int8().with_rules(Rule("nope", skip=True, optional=True))
    assert replaced(config) == ALL


def own_forward() -> nn.Module:
    module = nn.Conv2d(3, 4, 3)
    module.forward = module.forward  # type: ignore[method-assign]
    return module


class Unused(nn.Module):
    """Has a weight that no function call multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.kernel.sum()


class OwnAttention(nn.MultiheadAttention):
    """Might compute anything."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


NO_TWIN = (
    r"no quantized twin of .*Unused, which .*pass example= .*torchq.nn.register.*Unus"
)
DIRECTLY = "its weight is read by nn.MultiheadAttention directly"
SUBCLASS = r"a subclass of MultiheadAttention with code .*register a twin"


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (own_forward, "1", "forward was replaced on the instance"),
        (
            lambda: parametrizations.weight_norm(nn.LSTM(3, 3), "weight_hh_l0"),
            "1",
            "parametrized;",
        ),
        (lambda: nn.Conv2d(3, 4, 3, dtype=torch.complex64), "1", "complex dtype"),
        (lambda: nn.LazyLinear(3), "1", "not initialised yet; run one batch"),
        (lambda: nn.LSTM(3, 4), "1", "no rule matches"),
        (Unused, "1", NO_TWIN),
        (lambda: OwnAttention(4, 2), "1.out_proj", DIRECTLY),
        (lambda: OwnAttention(4, 2), "1", SUBCLASS),
        (lambda: torchq.nn.QuantLinear(2, 2), "1", "quantized already"),
        (lambda: nn.MaxPool2d(2), "1", "no rule matches"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sequential. only .* quantized")
def test_every_candidate_that_stays_float_has_a_reason(
    make: Any, name: str, reason: str
) -> None:
    report = torchq.quantize_(nn.Sequential(nn.Linear(2, 2), make()))
    assert [d.name for d in report.replaced] == ["0"]
    assert re.search(reason, {d.name: d.reason for d in report.skipped}[name])


def test_report_reads_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    model = nn.Sequential(
        nn.Linear(2, 2),
        SamePadConv2d(1, 1, 3),
        nn.Linear(2, 2),
    )
    report = torchq.plan(model, exclude="2", example=torch.ones(1, 4, 2))
    lines = report.table().splitlines()
    words = ("what", "input", "input", "SKIPPED")
    # Aligned.
    assert (
        len({line.index(word) for line, word in zip(lines, words, strict=False)}) == 1
    )
    what = "input int8 per-tensor max, weight int8 axis=0 max"
    by = "type:torch.nn.modules."
    assert [re.split(r"  +", line) for line in lines] == [
        ["module", "type", "what", "by"],
        ["0", "Linear", what, f"{by}linear.Linear"],
        [
            "1",
            "SamePadConv2d",
            f"{what}, at its call of conv2d",
            f"{by}conv.Conv[123]d",
        ],
        ["2", "Linear", "SKIPPED: excluded", "2"],
        ["2 quantized, 1 skipped, recipe int8; 84.6% of the multiply-adds quantized"],
    ]


def test_shared_modules_are_decided_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared))
    report = torchq.plan(model)
    assert [d.names for d in report.decisions] == [("0", "1.0")]
    assert "0 = 1.0" in report.table()
    assert torchq.plan(model, include="1.*").replaced[0].names == ("0", "1.0")
    with pytest.raises(ConfigError, match="nothing to quantize"):
        torchq.plan(model, exclude="1.0")


class Heads(nn.Module):
    """One head that runs, one for training, one that was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.aux, self.forgotten = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.aux(x) if self.training else self.main(x)


def test_a_run_shows_what_is_not_called() -> None:
    plan = torchq.plan(
        Heads().eval(),
        example=torch.ones(2, 4),
    )
    notes = {d.name: d.note for d in plan.decisions if d.note}
    assert notes == {"aux": NOT_CALLED, "forgotten": NOT_CALLED}
    report = torchq.quantize_(
        Heads(),
        example=torch.ones(2, 4),
    )
    assert "not called in" in str(report)
    assert not report.skipped


# --- rules with a position -----------------------------------------------------------------------


def ends() -> nn.Module:
    convs = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)
    return nn.Sequential(nn.AvgPool2d(2), *convs, nn.Flatten(), nn.Linear(4, 2))


def widths(report: torchq.swap.Plan) -> dict[str, tuple[int, str | None]]:
    return {
        d.name: (d.weight.num_bits, d.by)
        for d in report.replaced
        if d.weight is not None
    }


def test_ends_keep_eight_bits_and_the_report_says_why() -> None:
    report = torchq.plan(
        ends(),
        torchq.recipes.integer(4, 4, first_last=8),
    )
    assert widths(report) == {
        "1": (8, "1 (first layer)"),
        "3": (4, "type:torch.nn.modules.conv.Conv[123]d"),
        "5": (8, "5 (last layer)"),
    }


def test_excluding_the_last_layer_makes_no_other_the_last() -> None:
    report = torchq.plan(
        ends(), torchq.recipes.integer(4, 4, first_last=8), exclude="5"
    )
    assert {name: bits for name, (bits, _) in widths(report).items()} == {
        "1": 8,
        "3": 4,
    }


def test_one_layer_is_first_and_last() -> None:
    report = torchq.plan(
        nn.Linear(2, 2),
        torchq.recipes.integer(4, 4, first_last=8),
    )
    assert [(d.name, d.by) for d in report.replaced] == [("", "re:^$ (last layer)")]


def test_names_with_wildcards_are_meant_literally() -> None:
    model = nn.Module()
    for name in ("a[b]", "ab", "c"):
        model.add_module(name, nn.Linear(2, 2))
    report = torchq.plan(model, torchq.recipes.integer(4, 4, first_last=8))
    actual = {name: bits for name, (bits, _) in widths(report).items()}
    assert actual == {"a[b]": 8, "ab": 4, "c": 8}


def test_a_rule_must_match_its_layer_unless_it_is_optional() -> None:
    general = Rule("*", weight=INT4)
    required = Rule(nn.Linear, weight=INT8, position="first")
    message = r"Linear \(first layer\): the first layer is 1; expected one that it"
    with pytest.raises(ConfigError, match=message):
        torchq.plan(ends(), QuantConfig((general, required)))
    optional = Rule(nn.Linear, weight=INT8, position="first", optional=True)
    report = torchq.plan(ends(), QuantConfig((general, optional)))
    assert {bits for bits, _ in widths(report).values()} == {4}
    with pytest.raises(
        ConfigError, match="the last layer is none; expected one that it matches"
    ):
        torchq.plan(
            nn.ReLU(), QuantConfig((general, Rule("*", weight=INT8, position="last")))
        )


def test_a_plan_without_a_target_says_what_one_would_change() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
    )
    assert str(torchq.plan(model)).splitlines()[-2].startswith("no target: portable")
    assert "portable" not in str(torchq.plan(model, target="onnxruntime"))


def test_targets_may_add_operators_and_choose_codes_as_the_report_says() -> None:
    line = str(torchq.plan(ConvNet())).splitlines()[-2]
    assert line.endswith(
        "one may add operators and choose codes: torchq.plan(model, target=...)"
    )
    example = image_batches()[0]
    portable = torchq.plan(ConvNet().eval(), example=example)
    forms = {d.name: d.input for d in portable.replaced if d.weight is not None}
    adding = set()
    choosing = set()
    for target in torchq.targets():
        named = torchq.plan(ConvNet().eval(), target=target, example=example)
        if any(named.operator_rows()):
            adding.add(target)
        if any(named.decision(name).input != form for name, form in forms.items()):
            choosing.add(target)
    # Each does happen, and neither happens on all targets: so "may".
    assert set() < adding < set(torchq.targets())
    assert adding < choosing < set(torchq.targets())
