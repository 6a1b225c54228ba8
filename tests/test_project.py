"""The files around the code: commands, metadata, and documents that name files.

Sphinx checks references between pages when it builds the site. What it cannot see is here.
"""

import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import torchq

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    "README.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "RELEASE.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "changes/README.md",
    *(
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "docs").rglob("*.md"))
    ),
]
NAMED_FILE = re.compile(
    r"(?<![\w/.-])(?:tests|benchmarks|torchq|docs)/[\w./-]*\w(?:\.py|\.md|/)"
)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?:\]\(|(?:src|srcset)=\")([^)#\"]+)")


def hide(found: re.Match[str]) -> str:
    """Return blank lines, so that the lines behind them keep their numbers."""
    return "\n" * found[0].count("\n")


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_readme_has_one_command_to_see_it_and_one_to_test_it() -> None:
    """Continuous integration runs the lines of README.md that start like these two."""
    fresh = "python3 -m venv .venv && . .venv/bin/activate && pip install -e "
    commands = [
        line
        for line in read("README.md").splitlines()
        if line.startswith("python3 -m venv .venv ")
    ]
    see = fresh + '".[all]" && torchq demo'
    test = fresh + '".[all,dev]" && python -m pytest -n 2'
    assert commands == [see, test]


@pytest.mark.parametrize("script", [".ci/run", ".ci/checks", ".ci/release-check"])
def test_scripts_are_executable_bash(script: str) -> None:
    actual = subprocess.run(
        ["bash", "-n", str(ROOT / script)], capture_output=True, text=True
    )
    assert (actual.returncode, actual.stderr) == (0, "")
    assert (ROOT / script).stat().st_mode & 0o111


@pytest.mark.parametrize("tool", ["ruff", "mypy", "import-linter", "codespell"])
def test_the_tools_of_continuous_integration_have_one_version(tool: str) -> None:
    files = [".ci/requirements.txt", "docs/requirements.txt"]
    pinned = [re.findall(rf"^{tool}==[\d.]+$", read(file), re.M) for file in files]
    assert len(pinned[0] + pinned[1]) == 1
    assert all(f"-c {file}" in read(".ci/run") for file in files)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    message = read(document)
    named = NAMED_FILE.findall(message)
    named += [target for target in LINK.findall(message) if "://" not in target]
    base = (ROOT / document).parent
    missing = [
        name
        for name in named
        if not (ROOT / name).exists() and not (base / name).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_lines_of_documents_are_short(document: str) -> None:
    """Everything but tables, links and code has at most 100 characters a line."""
    long = [
        f"{document}:{number}"
        for number, line in enumerate(CODE.sub(hide, read(document)).splitlines(), 1)
        if len(line) > 100 and not line.startswith("|") and "](" not in line
    ]
    assert long == []


def test_changelog_describes_this_version() -> None:
    assert re.search(
        rf"^## {re.escape(torchq.__version__)} - \d{{4}}-\d\d-\d\d$",
        read("CHANGELOG.md"),
        re.M,
    )


def test_changes_are_named_so_that_a_release_collects_them() -> None:
    names = [
        path.name for path in (ROOT / "changes").iterdir() if path.name != "README.md"
    ]
    kinds = "removed|added|changed|fixed"
    assert [
        name for name in names if not re.fullmatch(rf"\+[\w-]+\.({kinds})\.md", name)
    ] == []


def test_what_replaces_a_name_that_is_gone_is_there() -> None:
    """Names in the right column of the tables of docs/migration.md can be imported."""
    gone = read("docs/migration.md").partition("## Names of 0.2.0 that are gone")[2]
    rows = [line for line in gone.splitlines() if line.startswith("| ")]
    named = {
        name
        for row in rows
        for name in re.findall(r"`(torchq\.[\w.]+)", row.split(" | ")[-1])
    }
    assert len(rows) > 150
    assert len(named) > 40
    for name in sorted(named):
        pkgutil.resolve_name(name)


def test_the_citation_is_of_this_version() -> None:
    assert f"version: {torchq.__version__}" in read("CITATION.cff").splitlines()


@pytest.mark.parametrize("source", ["", "https://example.org/somebody/torchq"])
def test_the_page_of_an_index_names_no_file_of_the_repository(source: str) -> None:
    """An index has none of them; its user has no checkout to install from, either."""
    build = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    readme = read("README.md")
    assert len([link for link in LINK.findall(readme) if "://" not in link]) > 10
    page = build["page_of_index"](readme, source, "1.2.3")
    assert [link for link in LINK.findall(page) if "://" not in link] == []
    assert 'pip install "torchq[all]" && torchq demo' in page
    assert "pip install -e" not in page
    assert "pytest" not in page
    assert ("<picture>" in page) == bool(source)
    for link in LINK.findall(readme):
        kind = "raw" if link.endswith(".svg") else "blob"
        address = link if "://" in link else f"{source}/{kind}/v1.2.3/{link}"
        assert ("://" in link or bool(source)) == (address in page), link


def supported() -> dict[str, tuple[str, str]]:
    """Return the oldest version of each thing in the table of docs/stability.md, and the tested."""
    table = read("docs/stability.md").partition("\n| --- |")[2].partition("\n\n")[0]
    oldest = {}
    for line in table.splitlines()[1:]:
        names, versions, tested = line.strip("| ").split(" | ")
        numbers = re.findall(r"[\d.]*\d", versions)
        oldest |= {
            name: (number, tested)
            for name, number in zip(names.split(", "), numbers, strict=False)
        }
    return oldest


def test_the_versions_that_are_supported_are_those_of_the_metadata() -> None:
    """docs/stability.md names what pyproject.toml asks for, and what tests run on."""
    metadata = read("pyproject.toml")
    of_users = metadata.partition("\ndependencies")[2].partition("[project.scripts]")[0]
    of_users = re.sub(
        r"^(integration|docs|dev) = \[.*?\]$", "", of_users, flags=re.M | re.S
    )
    bounds = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', of_users))
    bounds["Python"] = re.findall(r'^requires-python = ">=([\d.]+)"', metadata, re.M)[0]
    table = supported()
    assert {name: oldest for name, (oldest, _) in table.items()} == bounds
    workflow = read(".github/workflows/ci.yml")
    pythons = sorted(
        set(re.findall(r"3\.\d+", workflow)),
        key=lambda v: int(v[2:]),
    )
    assert table["Python"][1].split(", ") == pythons
    for name in ("torch", "torchvision"):
        assert f'"{name}=={table[name][0]}.*"' in read("Makefile")


def test_metadata_is_read_without_importing_torch() -> None:
    """Run setup.py as a build machine does, which has no torch to import."""
    program = (
        "import sys; sys.modules['torch'] = sys.modules['torchq'] = None;"
        "sys.argv = ['setup.py', '--version']; import runpy;"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    pytest.importorskip("setuptools", minversion="77")
    actual = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert actual.stdout.strip().endswith(torchq.__version__), actual.stderr


def public_packages() -> list[str]:
    """Return the packages and modules of torchq that have public names."""
    places = [path for path in (ROOT / "torchq").iterdir() if path.name[0] not in "_."]
    # What a runtime is, is public in torchq.runtimes.
    private = {"cli", "utils", "version", "config", "descriptor", "runtime"}
    return sorted(
        {path.stem for path in places if path.suffix in ("", ".py")} - private
    )


def test_the_reference_lists_every_top_level_name_and_package() -> None:
    page = read("docs/reference.md")
    listed = set(re.findall(r"~torchq\.[\w.]*?(\w+)$", page, re.MULTILINE))
    names = {name for name in torchq.__all__ if name != "__version__"}
    assert names - set(public_packages()) == listed
    packages = re.findall(r"^   torchq\.(\w+)$", page, re.MULTILINE)
    assert sorted(packages) == public_packages()


def test_every_picture_is_there_for_both_themes() -> None:
    message = "".join(map(read, DOCUMENTS))
    shown = set(re.findall(r"images/([\w-]+)-(?:light|dark)\.svg", message))
    assert shown
    for name in shown:
        for theme in ("light", "dark"):
            picture = ElementTree.parse(
                ROOT / "docs" / "images" / f"{name}-{theme}.svg"
            )
            assert len(list(picture.iter())) > 20
