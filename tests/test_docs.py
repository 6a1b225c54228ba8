"""Every Python block of README.md and the pages below docs/ runs, and prints what the page shows.

The blocks of a page run in order and share their names, as a reader would type them. A block that
imports torch or torchq is a program of its own and starts with fresh names; so does every block of
the pages in ``FRESH``. ``STAND_INS`` says which names a page may use without defining them; pages
in ``COMPLETE`` define everything themselves, as they are to be copied into an empty folder.

A ``text`` block right behind a Python block is what the latter prints; tests/printed.py compares.
The sections of docs/howto.md and docs/platforms.md are tested one by one, as each needs a library
or a runtime of its own.
"""

import gc
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests import models
from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.printed import differences
from torchq.compat import pytorch_quantization
from torchq.runtime import RUNTIMES, _proof, _row
from torchq.utils.registry import Registry
from torchq.utils.text import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md"]
PAGES += [
    path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))
]
HOW_TO = "docs/howto.md"
for parted in (HOW_TO, "docs/platforms.md"):
    PAGES.remove(parted)
    PAGES += [
        f"{parted}#{title}"
        for title in re.findall(r"^## (.*)$", (ROOT / parted).read_text(), re.M)
    ]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)
COMPLETE = ("README.md", "docs/quickstart.md", "docs/howto.md")
# What the pages show was printed by this version of torch or a newer one.
SHOWN_SINCE = (2, 11)
#: What a block defines, or runs as a program alone: it prints nothing here.
INSIDE = re.compile(r"^(?:def |if __name__ ).*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
IMPORTED = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)
PROGRAM = re.compile(r"^import torch(q(\.\w+)*)?$", re.MULTILINE)
FRESH = {"docs/fuse.md", "docs/migration.md"}
# Pages that export or train several times; the others call the same functions.
LONG = {
    "docs/frontends.md",
    "docs/index.md",
    "docs/howto.md#Detectors with lists and dictionaries",
    "docs/platforms.md#Qualcomm",
    "docs/platforms.md#torch, ONNX Runtime, OpenVINO",
}


def text_of(page: str) -> str:
    """Return the text of ``path``, or of one section of it: ``path#Title``."""
    path, _, title = page.partition("#")
    message = (ROOT / path).read_text(encoding="utf-8")
    return (
        re.split(r"^## ", message.split(f"\n## {title}\n")[1], flags=re.M)[0]
        if title
        else message
    )


def blocks(page: str) -> list[tuple[str, str | None]]:
    """Return the Python blocks of a page, each with the output that the page shows, if any."""
    return [(match["code"], match["shown"]) for match in BLOCK.finditer(text_of(page))]


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Do one step, as the training loop of a reader would."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.zero_grad()
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()


def common() -> dict[str, Any]:
    """Return the names that the pages share: a model, data, and a loop."""
    batches = [torch.randn(2, 3, 16, 16) for _ in range(2)]
    model = models.StagedNet().eval()
    return {
        "torch": torch,
        "torchq": torchq,
        "nn": nn,
        "model": model,
        "build_model": models.StagedNet,
        "example": batches[0],
        "x": batches[0],
        "loader": [(batch, None) for batch in batches],
        "loader_of_this_rank": batches,
        "batches": batches,
        "test_batches": batches,
        "train": train,
        "evaluate": lambda model: model(batches[0]),
    }


def with_branches() -> dict[str, Any]:
    """Return the common names around a model of re-parameterised blocks."""
    model = nn.Sequential(
        RepVGGBlock(3, 3),
        RepVGGBlock(3, 3),
    )
    return {**common(), "model": model.eval()}


def with_quantizers() -> dict[str, Any]:
    """Return the common names around a quantized model that is not calibrated."""
    names = common()
    torchq.quantize_(names["model"])
    return names


def with_old_checkpoint() -> dict[str, Any]:
    """Return a model, and its checkpoint written by pytorch-quantization in the current folder."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    ranges = {
        "0._input_quantizer._amax": torch.tensor(2.0),
        "0._weight_quantizer._amax": torch.ones(4, 1, 1, 1),
    }
    torch.save({**model.state_dict(), **ranges}, "calibrated.pth")
    old_model = nn.Sequential(pytorch_quantization.nn.QuantConv2d(3, 4, 3))
    old_model[0].input_quantizer.amax = 2.0
    return {**common(), "model": model, "old_model": old_model}


STAND_INS: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/calibration.md": with_quantizers,
    "docs/fuse.md": with_branches,
    "docs/migration.md": with_old_checkpoint,
}


@pytest.fixture(autouse=True)
def registries_and_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take out what examples register, and let ``init_process_group`` make a group of one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in rank.items():
        monkeypatch.setenv(name, str(value))
    before = [(r, set(r)) for r in gc.get_objects() if type(r) is Registry]
    yield
    for registry, names in before:
        for name in set(registry) - names:
            registry.remove(name)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def need_packages(code: str) -> None:
    """Skip the test if an optional package that the code imports is missing."""
    named = {r.name: r.packages for r in torchq.runtimes.RUNTIMES.values()}
    # A model is planned, and an ONNX file written, without the program that runs it.
    runs = re.search(r"deploy\(|\.pte\b", code)
    targets = re.findall(r'target="(\w+)"', code) if runs else []
    for name in IMPORTED.findall(code) + [
        package for t in targets for package in named.get(t, ())
    ]:
        pytest.importorskip(name, reason=f"the page is about {name}")
    if "onnx" in code:
        pytest.importorskip("onnxscript")


def with_marks(page: str) -> Any:
    return pytest.param(page, marks=[pytest.mark.slow] if page in LONG else [])


@pytest.mark.sample(9)
@pytest.mark.eight_bit_products("deploy")
@pytest.mark.parametrize("page", [with_marks(page) for page in PAGES if blocks(page)])
def test_the_code_runs(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need_packages("".join(code for code, _ in blocks(page)))
    monkeypatch.chdir(tmp_path)
    stand_ins = dict if page.startswith(COMPLETE) else STAND_INS.get(page, common)
    names = stand_ins()
    for code, shown in blocks(page):
        if page in FRESH or PROGRAM.search(code):
            names = stand_ins()
        exec(compile(code, page, "exec"), names)
        printed = capsys.readouterr().out
        if "print(" in INSIDE.sub("", code):
            assert printed.strip()
        if shown is not None and torch_version() >= SHOWN_SINCE:
            assert differences(shown, printed, 0.1) == []
        if not page.startswith(COMPLETE):
            check_results(code, names)


def torch_version() -> tuple[int, int]:
    """Return the first two numbers of torch's version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def check_results(block: str, names: dict[str, Any]) -> None:
    """Check what a block promises, where running without an error does not prove it."""
    model = names["model"]
    assert isinstance(model, nn.Module)
    if "torchq.patch(" in block:
        assert isinstance(model.stem, torchq.nn.QuantConv2d)
    if "calibrated.pth" in block or "quantized.pt" in block:
        assert model[0].input_quantizer.amax == 2
    if "torchq.calibrate(" in block and "restore_" not in block:
        quantizers = [
            m for m in model.modules() if isinstance(m, torchq.TensorQuantizer)
        ]
        assert [q for q in quantizers if q.mode != "off" and not q.calibrated] == []
    if "int8 =" in block:
        with torch.no_grad():
            assert isinstance(names["int8"](names["example"]), Tensor)


# --- docs/architecture.md -----------------------------------------------------------------------

MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
#: A file, or a folder, which ends in a slash.
PATH = re.compile(
    r"(?<![\w./])(?:(?:\w+/)*\w+\.(?:pyi?|md|txt|toml|json)|(?:\w+/)+)(?![\w/])"
)


def paths_that_are_missing(page: str) -> list[str]:
    """Paths are relative to torchq/, to the repository, or to the file named before in a row."""
    missing = []
    for line in page.splitlines():
        places = [ROOT / "torchq", ROOT]
        for name in PATH.findall(line):
            path = next((p / name for p in places if (p / name).exists()), None)
            if path is None:
                missing.append(name)
            else:
                places.append(path.parent)
    return missing


def test_the_map_names_files_that_exist() -> None:
    assert len(PATH.findall(MAP)) > 100
    assert paths_that_are_missing(MAP) == []
    row = "| nn/convert.py, gone.py; tests/gone/ | nn/modules/linear.py, conv.py; runtimes/ |"
    assert paths_that_are_missing(row) == ["gone.py", "tests/gone/"]


def test_the_map_names_what_the_code_has() -> None:
    sources = [ROOT / "pyproject.toml", *(ROOT / "torchq").rglob("*.py*")]
    texts = [p.read_text(encoding="utf-8") for p in sources if p.suffix != ".pyc"]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    named = {
        word
        for code in re.findall(r"`([^`\n]+)`", MAP)
        for word in re.findall(r"\w+", code)
    }
    assert len(named) > 100
    assert sorted(named - words) == []


def test_the_layers_are_those_of_the_contract() -> None:
    """Compare the diagram, from top to bottom, with the list that import-linter reads."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contract = re.search(r"^layers = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert contract is not None
    layers = [
        set(re.findall(r"\w+", line)) for line in re.findall(r'"(.*)"', contract[1])
    ]
    rows = re.findall(r"^ *\d+  (\S+(?:  \|  \S+)*)", MAP, re.MULTILINE)
    assert [set(re.findall(r"\w+", row)) for row in rows] == layers
    top = {
        path.stem for path in (ROOT / "torchq").iterdir() if path.suffix in ("", ".py")
    }
    assert top - {"__init__", "__pycache__"} <= set().union(*layers)


# --- docs/platforms.md --------------------------------------------------------------------------


def test_the_table_of_platforms_is_that_of_the_code() -> None:
    """Rows are sorted by what is proved; what is installed here is left out."""
    runtimes = sorted((RUNTIMES[name] for name in torchq.targets()), key=_proof)
    heading = ("target", "tried with", "formats", "grid", "proved", "extra")
    expected = markdown_table([heading, *(_row(runtime)[:-1] for runtime in runtimes)])
    assert expected.strip() in text_of("docs/platforms.md")
