"""How Sphinx builds the site: `make docs`.

Sphinx reads the docstrings by importing torchq, checks every reference between pages, and needs
no service. Furo is a theme with light and dark colours that reads well on a phone; MyST lets pages
be Markdown.
"""

from __future__ import annotations

import inspect
from typing import Any

import torchq

project = "torchq"
author = "The torchq authors"
copyright = author
release = torchq.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"torchq {release}"
html_static_path = ["images", "style"]
html_css_files = ["site.css"]
html_show_sourcelink = False
templates_path = ["templates"]
exclude_patterns = ["_build"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

# The prompt of a doctest and its output are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = False
# torch's own docstrings use references of torch's own documentation.
autodoc_inherit_docstrings = False
# The pages of packages are written to docs/generated while the site is built.
autosummary_generate = True
autosummary_imported_members = True

# A type such as bytes is also the name of attributes, between which Sphinx cannot choose.
suppress_warnings = ["ref.python"]


def of_torch(
    app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool:
    """Leave out what a class only borrows from torch."""
    del app, what, name, options
    borrowed = inspect.isbuiltin(obj) or str(getattr(obj, "__module__", "")).startswith(
        "torch."
    )
    return skip or borrowed


def setup(app: Any) -> None:
    app.connect("autodoc-skip-member", of_torch)
