"""Names load their modules at their first use: whichever is first, everything is there.

What is used first is used in a new process, by code that this file holds as text, as its own
imports are others.
"""

import ast
import copy
import importlib
import inspect
import json
import pkgutil
import pydoc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchq
from tests.processes import run_code
from torchq.graph import PASSES
from torchq.runtime import RUNTIMES
from torchq.swap.keeping import KEEPS

STUB = Path(torchq.__file__).with_suffix(".pyi")
#: A module that is imported first, and the registry that is read then.
FIRST = [
    ("torchq.swap", "torchq.runtime:RUNTIMES"),
    ("torchq.swap", "torchq.swap.keeping:KEEPS"),
    ("torchq.graph", "torchq.graph:PASSES"),
    ("torchq.nn", "torchq.runtime:RUNTIMES"),
    ("torchq.workflow", "torchq.swap.keeping:KEEPS"),
    ("torchq.errors", "torchq.graph:PASSES"),
    ("torchq.recipes", "torchq.swap.keeping:KEEPS"),
    ("torchq.hugging_face", "torchq.runtime:RUNTIMES"),
]
#: Reads a registry that nothing has filled, and quantizes for a runtime that nothing has imported.
USE = """
import importlib, json, pkgutil, sys
importlib.import_module({first!r})
registry = pkgutil.resolve_name({registry!r})
assert "torchq.runtimes" not in sys.modules
entries = sorted(registry)
import torch
from torchq.swap import plan
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
made = plan(model, target="onnxruntime", example=torch.ones(1, 4))
print(json.dumps([len(made.replaced), entries]))
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize(("first", "registry"), FIRST)
def test_any_module_may_be_imported_first(first: str, registry: str) -> None:
    replaced, entries = json.loads(run_code(USE.format(first=first, registry=registry)))
    assert replaced >= 2
    assert entries == sorted(pkgutil.resolve_name(registry))


def test_registries_have_what_other_packages_enter() -> None:
    assert "openvino" in RUNTIMES
    assert "pays" in KEEPS
    assert "fold_bn" in PASSES


def test_type_checkers_see_the_names_that_are_loaded() -> None:
    sources = {}
    declared: list[str] = []
    for statement in ast.parse(STUB.read_text("utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            sources |= {alias.name: statement.module for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            declared = ast.literal_eval(statement.value)
    assert declared == torchq.__all__
    assert sorted(sources) == sorted(declared)
    version = {"__version__": "torchq.version"}
    modules = {name: "torchq" for name in sources if sources[name] == "torchq"}
    assert sources == {**torchq._SOURCES, **version, **modules}
    for name, module in torchq._SOURCES.items():
        assert getattr(torchq, name) is getattr(importlib.import_module(module), name)
    for name in modules:
        assert getattr(torchq, name) is sys.modules[f"torchq.{name}"]


LOOK = """
import sys
import torchq

def print_loaded():
    print(*sorted(name for name in sys.modules if name.startswith("torchq.")))

print_loaded()
dir(torchq)
for name in ("__wrapped__", "__test__", "_private", "a.b", "quantise_"):
    assert not hasattr(torchq, name)
print_loaded()
assert torchq.errors.ConfigError is torchq.errors.ConfigError
print_loaded()
"""


def test_looking_at_torchq_loads_nothing() -> None:
    assert run_code(LOOK).splitlines() == [
        "torchq.version",
        "torchq.version",
        "torchq.errors torchq.version",
    ]


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    nearest = r"no attribute 'quantise_'; did you mean torchq.quantize_\?$"
    with pytest.raises(AttributeError, match=nearest):
        pkgutil.resolve_name("torchq:quantise_")
    with pytest.raises(AttributeError, match=r"no attribute 'zzzzzz'$"):
        pkgutil.resolve_name("torchq:zzzzzz")
    with pytest.raises(ImportError, match="cannot import name 'quantise_'"):
        exec("from torchq import quantise_", {})


def test_tools_that_look_into_a_module_see_all_names() -> None:
    names: dict[str, object] = {}
    exec("from torchq import *", names)
    assert names.keys() - {"__builtins__"} == set(torchq.__all__)
    assert {name for name, _ in inspect.getmembers(torchq)} == set(torchq.__all__)
    assert "quantize_(" in pydoc.plain(pydoc.render_doc(torchq))
    for name in torchq.__all__:
        assert getattr(torchq, name) is names[name]


def test_modules_that_are_not_public_are_reached_too() -> None:
    code = (
        "import torchq; print(torchq.swap.Plan.__name__, torchq.hugging_face.__name__)"
    )
    assert run_code(code).split() == ["Plan", "torchq.hugging_face"]


#: Each name is used first by a thread of its own, all at the same time.
THREADS = """
import threading
import torchq
barrier = threading.Barrier(len(torchq.__all__))
values = {}

def use(name):
    barrier.wait()
    values[name] = getattr(torchq, name)

threads = [threading.Thread(target=use, args=(name,)) for name in torchq.__all__]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
same = [name for name in torchq.__all__ if values.get(name) is getattr(torchq, name)]
print(sorted(set(torchq.__all__) - set(same)))
"""


def test_threads_may_use_names_at_the_same_time() -> None:
    assert run_code(THREADS).split() == ["[]"]


LOAD = """
import json
import torchq, torch
models = torch.load({path!r}, weights_only=False)
x = torch.tensor({x!r})
with torch.no_grad():
    print(json.dumps([model(x).tolist() for model in models]))
"""


def test_pickled_models_load_after_import_torchq_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    torchq.quantize_(model, target="torch", example=x)
    torchq.calibrate(model, [x], progress=False)
    models = [model, copy.deepcopy(model), torchq.deploy(model, example=x, check=False)]
    torch.save(models, tmp_path / "models.pt")
    with torch.no_grad():
        expected = [model(x).tolist() for model in models]
    code = LOAD.format(
        path=str(tmp_path / "models.pt"),
        x=x.tolist(),
    )
    assert json.loads(run_code(code)) == expected
