"""The diagram of the package, executable: which part may import which, and the house rules that can be read off the text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import architecture as rules
from tests.architecture import Source

ROOT = Path(__file__).resolve().parent.parent

# A module may import from rows above its own and from its own unit (a module or a package). Units of one row never import each other.
# A module belongs to the unit with the longest matching name. The numbers are the layers of docs/architecture.md.
LAYERS = [
    ["torchq.errors", "torchq.version"],  # 0
    ["torchq.utils"],
    ["torchq.formats", "torchq.graph"],  # 1
    ["torchq.descriptor", "torchq.functional", "torchq.fusion"],  # 2
    ["torchq.config"],
    ["torchq.recipes"],
    ["torchq.calib"],  # 3
    ["torchq.nn"],  # 4
    ["torchq.swap"],  # 5
    ["torchq.workflow"],  # 6
    ["torchq.qat"],
    ["torchq.onnx", "torchq.lowering"],  # 7
    ["torchq.compat"],  # 8
    ["torchq"],  # 9
    ["torchq.cli"],
    ["torchq.__main__"],
]
ONNX_UNITS = ["torchq.functional.onnx_ops", "torchq.onnx"]
ONNX_PACKAGES = ["torch.onnx", "onnx", "onnx_ir", "onnxscript", "onnxruntime"]
AT_IMPORT = {"torchq", "torch", "tqdm"}  # what `import torchq` may load beyond the standard library
TRITON_UNITS = ["torchq.functional.kernels"]
MAX_FILE, MAX_FUNCTION = 400, 50


@pytest.fixture(scope="module")
def package() -> dict[str, Source]:
    return rules.read_package(ROOT / "torchq")


@pytest.fixture(scope="module")
def everything(package: dict[str, Source]) -> dict[str, Source]:
    return {
        **package,
        **rules.read_package(ROOT / "tests"),
        **rules.read_package(ROOT / "benchmarks"),
    }


def test_imports_point_down(package: dict[str, Source]) -> None:
    assert rules.upward_imports(package, LAYERS) == []


def test_there_is_no_cycle(package: dict[str, Source]) -> None:
    assert rules.find_cycle(package) == []


def test_nothing_but_compat_imports_compat(package: dict[str, Source]) -> None:
    assert rules.third_party_imports(package, "torchq.compat", ["torchq.compat"]) == []


def test_no_star_imports(everything: dict[str, Source]) -> None:
    assert rules.star_imports(everything) == []


def test_no_torchq_import_inside_a_function(package: dict[str, Source]) -> None:
    assert rules.local_imports(package) == []


@pytest.mark.parametrize("name", ONNX_PACKAGES)
def test_onnx_is_known_to_few(package: dict[str, Source], name: str) -> None:
    """Anybody may ask torch whether an export is running; what an export looks like is known to ONNX_UNITS."""
    uses = rules.third_party_imports(package, name, ONNX_UNITS)
    assert [use for use in uses if not use.endswith(" torch.onnx.is_in_onnx_export")] == []


def test_tqdm_has_one_importer(package: dict[str, Source]) -> None:
    assert rules.third_party_imports(package, "tqdm", ["torchq.utils.progress"]) == []


def test_torchvision_is_for_the_command_line(package: dict[str, Source]) -> None:
    assert rules.third_party_imports(package, "torchvision", ["torchq.cli"]) == []


def test_deprecated_quantization_of_torch_is_unused(everything: dict[str, Source]) -> None:
    benchmarks_compare = [name for name in everything if name.startswith("benchmarks.")]
    for name in ("torch.ao", "torch.quantization"):
        assert rules.third_party_imports(everything, name, benchmarks_compare) == []


def test_importing_torchq_needs_only_torch_and_tqdm(package: dict[str, Source]) -> None:
    """Extras are imported in the function that needs them; Triton kernels live in a file that is only imported where Triton is."""
    packages = {
        entry.target.partition(".")[0]
        for source in package.values()
        for entry in source.imports
        if not entry.in_function
    }
    foreign = packages - AT_IMPORT - set(sys.stdlib_module_names)
    allowed = {"triton": TRITON_UNITS, "torchvision": ["torchq.cli"]}
    for name in sorted(foreign):
        assert (
            rules.third_party_imports(package, name, allowed.get(name, []), in_function=False) == []
        )


def test_only_the_command_line_prints(package: dict[str, Source]) -> None:
    assert rules.printing(package, ["torchq.cli"]) == []


def test_one_file_changes_the_class_of_objects(package: dict[str, Source]) -> None:
    assert rules.assigning_class(package) == [
        name for name in ["torchq.nn.convert"] if name in package
    ]


def test_files_are_short(everything: dict[str, Source]) -> None:
    assert rules.long_files(everything, MAX_FILE) == []


def test_functions_are_short(everything: dict[str, Source]) -> None:
    assert rules.long_functions(everything, MAX_FUNCTION) == []


def test_public_modules_say_what_they_export(package: dict[str, Source]) -> None:
    assert rules.missing_exports(package) == []


def test_public_names_are_documented(package: dict[str, Source]) -> None:
    assert rules.missing_docstrings(package) == []


# --- the rules themselves: each must catch the snippet written for it -----------------------------------------------------------


def sources(**texts: str) -> dict[str, Source]:
    """Modules from keyword arguments: ``nn__conv="..."`` is torchq.nn.modules.conv."""
    return {
        name: Source(name, text)
        for name, text in (
            ("torchq." + key.replace("__", "."), text) for key, text in texts.items()
        )
    }


@pytest.mark.parametrize(
    "snippets",
    [
        {"formats__a": "import torchq.nn.modules.conv", "nn__conv": ""},  # upward
        {"functional__a": "from torchq.fusion import algebra", "fusion__algebra": ""},  # sideways
        {"functional__a": "from torchq.descriptor import QuantDescriptor"},
        {"onnx__onnx": "from torchq.lowering.table import rows"},
        {"nn__a": "from torchq import plan"},
        {"nn__a": "def f():\n    import importlib\n    importlib.import_module('torchq.swap')"},
        {"nn__a": "from ..swap import plan"},
        {"novelty": ""},  # in no layer
    ],
)
def test_upward_imports_are_caught(snippets: dict[str, str]) -> None:
    assert len(rules.upward_imports(sources(**snippets), LAYERS)) == 1


def test_downward_imports_are_allowed() -> None:
    modules = sources(
        fusion__engine="from torchq.graph.trace import trace\nfrom torchq.errors import FuseError",
        config="from torchq.descriptor import QuantDescriptor",
        nn__conv="from torchq.nn.convert import convert\nimport torch",
        cli__demo="import torchq",
    )
    assert rules.upward_imports(modules, LAYERS) == []


def test_cycles_are_caught() -> None:
    modules = sources(
        nn__a="from torchq.nn import b",
        nn__b="from torchq.nn.c import x",
        nn__c="import torchq.nn.a",
    )
    assert rules.find_cycle(modules) == ["torchq.nn.a", "torchq.nn.b", "torchq.nn.c", "torchq.nn.a"]
    assert rules.find_cycle(sources(nn__a="from torchq.nn import b", nn__b="import torch")) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (rules.star_imports, "from torch import *"),
        (rules.local_imports, "def f():\n    from torchq.nn import convert"),
        (rules.local_imports, "class A:\n    def f(self):\n        import torchq"),
        (
            lambda modules: rules.third_party_imports(modules, "torch.ao", []),
            "import torch.ao.quantization as q",
        ),
        (
            lambda modules: rules.third_party_imports(modules, "torch.ao", []),
            "import torch\nx = torch.ao.nn.Linear",
        ),
        (
            lambda modules: rules.third_party_imports(modules, "torch.onnx", []),
            "from torch import onnx",
        ),
        (
            lambda modules: rules.third_party_imports(modules, "tqdm", ["torchq.utils"]),
            "def f():\n    from tqdm.auto import tqdm",
        ),
        (lambda modules: rules.printing(modules, ["torchq.cli"]), "def f():\n    print(1)"),
        (rules.assigning_class, "def f(module, cls):\n    module.__class__ = cls"),
        (
            rules.assigning_class,
            "def f(module, cls):\n    object.__setattr__(module, '__class__', cls)",
        ),
        (lambda modules: rules.long_files(modules, 3), "a = 1\n" * 4),
        (
            lambda modules: rules.long_functions(modules, 3),
            "def f():\n    '''One.\n\n    Two.'''\n    a = 1\n    b = 2\n    return a + b",
        ),
        (rules.missing_exports, "a = 1"),
        (rules.missing_exports, "__all__ = ['a', 'b']\na = 1"),
        (rules.missing_exports, "__all__ = ['a', 'a']\na = 1"),
        (rules.missing_docstrings, "a = 1"),
        (rules.missing_docstrings, "'''Text.'''\n__all__ = ['f']\ndef f(): pass"),
    ],
)
def test_each_rule_catches_its_offender(rule: object, text: str) -> None:
    assert callable(rule)
    assert len(rule(sources(nn__offender=text))) == 1


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (rules.local_imports, "import torchq.nn\ndef f():\n    import onnx"),
        (rules.assigning_class, "def f(a, b):\n    return a.__class__ is b.__class__"),
        (
            lambda modules: rules.long_functions(modules, 3),
            "def f():\n    '''One.\n\n    Two.'''\n    a = 1\n    return a",
        ),
        (rules.missing_exports, "__all__ = ['a', 'B']\nfrom x import y as a\nclass B: pass"),
        (rules.missing_exports, ""),
        (rules.missing_exports, "'''Text.'''"),
        (
            rules.missing_docstrings,
            "'''Text.'''\n__all__ = ['f']\ndef f():\n    '''Text.'''\ndef _g(): pass",
        ),
    ],
)
def test_rules_leave_good_code_alone(rule: object, text: str) -> None:
    assert callable(rule)
    assert rule(sources(nn__fine=text)) == []
