"""Build torchq. The metadata is in pyproject.toml, but for the page that an index shows.

An index has no files of the repository, so README's pictures and links get the address of the
source there. Without one, as long as pyproject.toml has no ``[project.urls]``, pictures are left
out and links are words.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
#: What README says of a checkout, and what it means on an index.
IN_CHECKOUT = {
    'pip install -e ".[all]"': 'pip install "torchq[all]"',
    "`pip install -e .` alone": "`pip install torchq` alone",
}
#: Needs the tests, which are in a checkout or in the source distribution.
TESTS = re.compile(r"^Check it:\n\n```bash\n.*?```\n\n", re.MULTILINE | re.DOTALL)
PICTURES = re.compile(r"<picture>.*?</picture>\n\n", re.DOTALL)
FILE_OF_PICTURE = re.compile(r'(?<=(?:src|set)=")(?![a-z]+:)')
LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)]*)\)")


def page_of_index(readme: str, source: str, version: str) -> str:
    """Return README as an index is to show it.

    Args:
        readme: its text, whose pictures and links are files of the repository.
        source: the address of the repository at a host with ``/blob/`` and ``/raw/``, or nothing.
        version: whose tag the links name.
    """
    page = TESTS.sub("", readme)
    for in_checkout, on_index in IN_CHECKOUT.items():
        page = page.replace(in_checkout, on_index)
    if not source:
        return LINK.sub(r"\1", PICTURES.sub("", page))
    page = FILE_OF_PICTURE.sub(f"{source}/raw/v{version}/", page)
    return LINK.sub(rf"[\1]({source}/blob/v{version}/\2)", page)


def read(name: str) -> str:
    """Return the text of a file beside this one."""
    return (ROOT / name).read_text(encoding="utf-8")


if __name__ == "__main__":  # as pip and build run this file
    address = re.search(r'^Source = "(.*?)/?"$', read("pyproject.toml"), re.MULTILINE)
    number = re.search(
        r'^__version__ = "(.*)"$', read("torchq/version.py"), re.MULTILINE
    )
    assert number is not None
    setup(
        long_description=page_of_index(
            read("README.md"), address[1] if address else "", number[1]
        ),
        long_description_content_type="text/markdown",
    )
