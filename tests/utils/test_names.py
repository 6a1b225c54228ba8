"""Patterns, names of modules, the registry, temporary modes."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from torchq.errors import ConfigError
from torchq.utils import (
    Registry,
    check_pattern,
    evaluating,
    matches,
    modules_with_names,
    pattern_text,
    qualified_name,
    set_submodule,
)


def is_linear(name: str, module: nn.Module) -> bool:
    """A callable pattern."""
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize(
    ("pattern", "selects"),
    [
        ("layer1.0.conv", True),
        ("layer1.*", True),
        ("*conv", True),
        ("layer?.0.con[uv]", True),
        ("layer1", False),
        ("LAYER1.*", False),
        ("re:conv$", True),
        ("re:^conv", False),
        ("type:Conv2d", True),
        ("type:torch.nn.modules.conv.Conv[12]d", True),
        ("type:Conv", False),
        (nn.Conv2d, True),
        (nn.Module, True),
        (nn.Conv1d, False),
        (lambda name, module: name.endswith("conv") and module.groups == 1, True),
        (is_linear, False),
    ],
)
def test_patterns(pattern: Any, selects: bool) -> None:
    assert (
        matches(check_pattern(pattern), ["layer1.0.conv"], nn.Conv2d(1, 1, 1))
        is selects
    )


def test_any_name_of_a_shared_module_will_do() -> None:
    assert matches("b", ["a", "b"], nn.ReLU())
    assert not matches("c", ["a", "b"], nn.ReLU())
    assert matches(
        lambda name, module: name == "b",
        ["a", "b"],
        nn.ReLU(),
    )


def test_types_are_judged_by_the_class_given() -> None:
    assert matches("type:Linear", ["a"], nn.ReLU(), nn.Linear)
    assert matches(nn.Linear, ["a"], nn.ReLU(), nn.Linear)


@pytest.mark.parametrize("pattern", ["", "re:(", 3, None, ["a"]])
def test_impossible_patterns(pattern: Any) -> None:
    with pytest.raises(ConfigError, match=r"^pattern"):
        check_pattern(pattern)


def test_texts() -> None:
    assert pattern_text("a.*") == "a.*"
    assert pattern_text(nn.Linear) == "type:torch.nn.modules.linear.Linear"
    assert pattern_text(is_linear) == "is_linear"
    assert qualified_name(nn.Linear) == "torch.nn.modules.linear.Linear"


def test_modules_with_all_their_names() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(shared, nn.Sequential(shared))
    assert [
        (names, type(module).__name__) for names, module in modules_with_names(model)
    ] == [
        (("",), "Sequential"),
        (("0", "1.0"), "ReLU"),
        (("1",), "Sequential"),
    ]


def test_set_submodule() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU()))
    new = nn.Tanh()
    set_submodule(model, "0.0", new)
    assert model[0][0] is new


def test_evaluating_gives_each_module_its_mode_back() -> None:
    model = nn.Sequential(
        nn.Dropout(),
        nn.Sequential(nn.BatchNorm1d(2).eval()),
    )
    modes = [m.training for m in model.modules()]
    for error in (None, ZeroDivisionError):
        try:
            with evaluating(model):
                assert not any(m.training for m in model.modules())
                if error:
                    raise error
        except ZeroDivisionError:
            pass
        assert [m.training for m in model.modules()] == modes


def test_registry() -> None:
    registry: Registry[str, int] = Registry("thing")
    assert registry.add("a", 1) == 1
    registry.register("b")(2)
    assert (
        list(registry),
        len(registry),
        "a" in registry,
        registry["b"],
        registry.get("c"),
    ) == (
        ["a", "b"],
        2,
        True,
        2,
        None,
    )
    message = "thing 'a' is registered already, as 1; expected a new key"
    with pytest.raises(ConfigError, match=message):
        registry.add("a", 3)
    with pytest.raises(
        ConfigError, match="unknown thing 'c'; expected one of: 'a', 'b'"
    ):
        registry["c"]
    registry.remove("a")
    assert list(registry) == ["b"]
    with pytest.raises(ConfigError, match="thing 'a'"):
        registry.remove("a")


#: First uses of a registry that holds "first" and "second", and what they return or raise.
FIRST_USES: dict[str, tuple[Callable[[Registry[str, int]], object], object]] = {
    "look up": (lambda registry: registry["second"], 2),
    "get": (lambda registry: registry.get("second"), 2),
    "values": (lambda registry: registry.values(), (1, 2)),
    "contains": (lambda registry: "first" in registry, True),
    "iterate": (list, ["first", "second"]),
    "count": (len, 2),
    "remove": (
        lambda registry: (registry.remove("first"), list(registry))[1],
        ["second"],
    ),
    "add": (lambda registry: (registry.add("third", 3), list(registry)[2])[1], "third"),
}


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[str, int]:
    """A registry that a module fills, which nobody has imported."""
    registry: Registry[str, int] = Registry("thing", filled_by="module_that_fills")
    holder: Any = ModuleType("module_that_holds")
    holder.REGISTRY = registry
    monkeypatch.setitem(sys.modules, "module_that_holds", holder)
    monkeypatch.delitem(sys.modules, "module_that_fills", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_that_fills.py").write_text(
        "from module_that_holds import REGISTRY\n"
        "REGISTRY.add('first', 1)\n"
        "assert list(REGISTRY) == ['first']\n"
        "REGISTRY.register('second')(2)\n"
    )
    return registry


@pytest.mark.parametrize(("use", "expected"), FIRST_USES.values(), ids=FIRST_USES)
def test_each_first_use_of_a_registry_fills_it(
    filled: Registry[str, int],
    use: Callable[[Registry[str, int]], object],
    expected: object,
) -> None:
    assert use(filled) == expected


def test_a_name_that_torchq_brings_is_refused_before_it_is_loaded(
    filled: Registry[str, int],
) -> None:
    with pytest.raises(ConfigError, match="thing 'second' is registered already, as 2"):
        filled.add("second", 5)
    assert filled["second"] == 2
