"""``sphinx-build -W docs build/docs`` makes the pages."""

import deepmemory

project = "deepmemory"
author = "the deepmemory contributors"
release = deepmemory.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"deepmemory {release}"
html_static_path: list[str] = []
exclude_patterns = ["gradients-study/synthetic.md"]  # a page that `make report` writes and git ignores
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
