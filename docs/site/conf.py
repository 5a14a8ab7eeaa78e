"""How the pages become a site: `make docs`.

The one rule: they are read as they stand, as on a disk, and what leads nowhere is an error.
"""

from mqks.version import __version__

project = "MQKS"
copyright = "the authors of MQKS"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = [
    "CHANGELOG.md",
    "clients/node/README.md",
    "docs/*.md",
    "docs/site/*.md",
    "examples/README.md",
    "tests/README.md",
    "tests/conformance/README.md",
]

myst_heading_anchors = 4
default_role = "code"  # As docstrings have it.
autodoc_typehints_format = "short"

html_theme = "furo"
html_title = f"MQKS {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["root"]
html_show_sourcelink = False
# Transcripts, and lines from the middle of a function, are no language.
suppress_warnings = ["misc.highlighting_failure"]
