"""Rules and configurations: validation, order, round trips."""

import json
from typing import Any

import pytest
from torch import nn

import torchq
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import ConfigError

INT8 = QuantDescriptor()


def is_first(name: str, module: nn.Module) -> bool:
    """A callable pattern."""
    return name == "0"


RULES = [
    Rule("*", input=INT8),
    Rule("layer?.*", weight=QuantDescriptor(4, axis=0), optional=True),
    Rule("re:^head", skip=True),
    Rule("type:Conv2d", input=INT8, weight=INT8),
    Rule(nn.Linear, weight=INT8),
    Rule("*.last"),
    Rule("type:*Conv2d", weight=INT8, position="first", optional=True),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule_round_trip(rule: Rule) -> None:
    back = Rule.from_dict(json.loads(json.dumps(rule.to_dict())))
    assert (
        back.input,
        back.weight,
        back.position,
        back.skip,
        back.optional,
        str(back),
    ) == (
        rule.input,
        rule.weight,
        rule.position,
        rule.skip,
        rule.optional,
        str(rule),
    )
    if isinstance(rule.pattern, str):
        assert back == rule


def test_a_saved_class_selects_that_class() -> None:
    """A class also selects subclasses; a saved one is text and selects by qualified name."""
    back = Rule.from_dict(Rule(nn.Linear, weight=INT8).to_dict())
    assert back.pattern == "type:torch.nn.modules.linear.Linear"
    assert [
        d.name
        for d in torchq.plan(
            nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1)), QuantConfig((back,))
        ).replaced
    ] == ["0"]


def test_config_round_trip() -> None:
    config = QuantConfig(
        tuple(rule for rule in RULES if isinstance(rule.pattern, str)), name="mine"
    )
    assert QuantConfig.from_json(config.to_json()) == config
    assert QuantConfig.from_json(config.to_json(indent=None)) == config
    assert QuantConfig.from_dict(config.to_dict()) == config
    assert hash(QuantConfig.from_dict(config.to_dict())) == hash(config)
    assert json.loads(config.to_json())["version"] == 1


def test_with_rules_adds_at_the_end() -> None:
    config = torchq.recipes.int8()
    longer = config.with_rules(
        Rule("head", skip=True),
        Rule("0", input=INT8),
    )
    assert longer.rules[:-2] == config.rules
    assert [str(r) for r in longer.rules[-2:]] == [
        "head",
        "0",
    ]
    assert longer.name == config.name
    assert len(config.rules) == len(longer.rules) - 2


def test_a_list_of_rules_will_do() -> None:
    rule = Rule("a", input=INT8)
    assert QuantConfig([rule]) == QuantConfig((rule,))  # type: ignore[arg-type]


def test_text() -> None:
    config = QuantConfig(
        (
            Rule("a", input=INT8),
            Rule(nn.Linear, weight=QuantDescriptor(4)),
            Rule(is_first, skip=True),
        ),
        name="mine",
    )
    assert str(config).splitlines() == [
        "QuantConfig mine",
        "  a: input: int8 per-tensor max; weight: float",
        "  type:torch.nn.modules.linear.Linear: input: float; weight: int4 per-tensor max",
        "  is_first: skip",
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"pattern": ""},
            "pattern: got an empty string; expected a glob, 're:...', 'type:...', a",
        ),
        ({"pattern": 3}, r"pattern: got 3 \(int\); expected a glob"),
        ({"pattern": "re:("}, r"pattern 're:\(': not a regular expression \("),
        ({"input": 8}, "rule a: got input=8; expected a QuantDescriptor or None"),
        ({"weight": "int8"}, "rule a: got weight='int8'; expected a QuantDescriptor"),
        (
            {"skip": True, "input": INT8},
            "rule a: skip=True with a descriptor; expected one or the",
        ),
        (
            {"position": "middle"},
            "rule a .*: got position='middle'; expected 'first', 'last' or No",
        ),
        (
            {"weight": QuantDescriptor(4, unsigned="auto")},
            "rule a: got unsigned='auto' for a weight; expected a bool",
        ),
    ],
)
def test_rules_that_cannot_be(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Rule(**{"pattern": "a", **given})


def test_a_callable_cannot_be_saved() -> None:
    with pytest.raises(
        ConfigError, match="rule is_first: a callable cannot be saved; expected a"
    ):
        Rule(is_first).to_dict()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            {"pattern": "a", "wieght": {}},
            r"got unknown keys \['wieght'\]; expected some of \['inp",
        ),
        ({"skip": True}, "rule: got {'skip': True}; expected a 'pattern'"),
        (
            {"pattern": "a", "skip": "false"},
            "rule a: got skip='false'; expected True or False",
        ),
        (
            {"pattern": "a", "optional": 1},
            "rule a: got optional=1; expected True or False",
        ),
        ({"pattern": nn.Linear}, "rule: got pattern <class .*>; expected text"),
        ("a", "rule: got a str; expected a mapping with some of"),
        (
            {"pattern": "a", "input": {"bits": 8}},
            r"QuantDescriptor: got unknown keys \['bits'\]",
        ),
    ],
)
def test_data_that_is_no_rule(data: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Rule.from_dict(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"version": 1, "rules": ["a"]}, "rule: got a str; expected a mapping"),
        (
            {"version": True, "rules": []},
            "got version True and keys .*; expected version 1",
        ),
        (
            {"version": 1.0, "rules": []},
            "config: got version 1.0 and keys .*; expected version 1",
        ),
        ({"version": 2, "rules": []}, "config: got version 2"),
        (
            {"version": 1, "rules": {}},
            "config: got version 1 and keys .*; expected version 1 with",
        ),
        (
            {"rules": []},
            r"config: got version None and keys \['rules'\]; expected version 1 with",
        ),
        ({"version": 1, "rules": [], "name": 3}, "config: got name 3; expected text"),
        (
            {"version": 1, "rules": [], "excluded": []},
            r"config: got unknown keys \['excluded'\]; expected some of \['name', 'rules', 'ver",
        ),
        ([], "config: got a list; expected a mapping"),
        ("[" * 100_000, "config: JSON that is nested too deeply"),
        ("{", r"config: not JSON \("),
    ],
)
def test_data_that_is_no_configuration(data: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        QuantConfig.from_json(data if isinstance(data, str) else json.dumps(data))


def test_rules_are_rules() -> None:
    with pytest.raises(
        ConfigError, match="config custom: got 'a' among the rules; expected Rule"
    ):
        QuantConfig(("a",))  # type: ignore[arg-type]


def test_ends_get_a_width_of_their_own() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    config = torchq.recipes.integer(4, 4)
    plan = torchq.plan(model, config.with_ends(8))
    assert [d.weight.num_bits for d in plan.decisions if d.weight] == [8, 4, 4, 8]
    plan = torchq.plan(model, torchq.recipes.w4a4().with_ends(None))
    assert [d.weight is None for d in plan.decisions] == [True, False, False, True]
    wide = torchq.recipes.w4a4()
    assert wide.with_ends(8) == wide
    assert torchq.recipes.int8().with_ends(8) == torchq.recipes.int8()


def test_what_overrules_a_rule_overrules_its_ends() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    config = torchq.recipes.integer(4, 4).with_rules(Rule("0", skip=True))
    plan = torchq.plan(model, config.with_ends(8))
    assert [d.weight and d.weight.num_bits for d in plan.decisions] == [None, 4, 4, 8]


def test_inputs_get_zero_points_where_that_is_possible() -> None:
    plain = torchq.recipes.integer(8, 4).with_zero_points().rules[0].input
    assert plain is not None
    assert (plain.symmetric, plain.unsigned) == (False, True)
    for recipe in (
        torchq.recipes.fp8(),
        torchq.recipes.nvfp4(),
        torchq.recipes.int8_dynamic(),
    ):
        assert recipe.with_zero_points() == recipe
    once = torchq.recipes.int8().with_zero_points()
    assert once.with_zero_points() == once
