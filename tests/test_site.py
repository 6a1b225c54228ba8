"""The site is complete: a page for each public package and name, and links that lead somewhere.

Sphinx checks references between pages when it builds the site. What it cannot see is here.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import torchq

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\"]+)\"")


def public_packages() -> list[str]:
    """Return the packages and modules of torchq that have public names."""
    places = [path for path in (ROOT / "torchq").iterdir() if path.name[0] not in "_."]
    # What a runtime is, is public in torchq.runtimes.
    private = {"cli", "utils", "version", "config", "descriptor", "runtime"}
    return sorted({path.stem for path in places if path.suffix in ("", ".py")} - private)


def test_the_reference_lists_every_top_level_name_and_package() -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"~torchq\.[\w.]*?(\w+)$", page, re.MULTILINE))
    names = {name for name in torchq.__all__ if name != "__version__"}
    assert names - set(public_packages()) == listed
    packages = re.findall(r"^   torchq\.(\w+)$", page, re.MULTILINE)
    assert sorted(packages) == public_packages()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_relative_links_lead_to_files(page: str) -> None:
    found = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    targets = [first or second for first, second in found]
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_picture_is_there_for_both_themes() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    shown = {
        name
        for page in pages
        for name in re.findall(r"images/([\w-]+)-(?:light|dark)\.svg", page.read_text())
    }
    assert shown
    for name in shown:
        for theme in ("light", "dark"):
            picture = ElementTree.parse(DOCS / "images" / f"{name}-{theme}.svg")
            assert len(list(picture.iter())) > 20
