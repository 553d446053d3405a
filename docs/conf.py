"""The site of the documentation: `make docs` builds it, and every warning is an error.

Three pages are files of the root: the first page is the README, followed by the lists of docs/index.md. The reference
is generated from the code. A link to another file outside of docs/ becomes a download.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "prefect-rlhf"
html_title = "prefect-rlhf"
extensions = ["myst_parser"]
html_theme = "furo"
html_show_copyright = False
html_copy_source = False
exclude_patterns = ["examples"]
myst_heading_anchors = 4

OF_THE_ROOT = {"index": "README.md", "contributing": "CONTRIBUTING.md", "reporting": "SECURITY.md"}
"""Files of the root by the page that shows them."""
REFERENCE = "<!-- reference -->"
"""Stands for the generated sections in docs/reference.md."""


def setup(app: Any) -> None:
    """Have Sphinx pass each source through `adapted`, and read the pages again whose content is not in their files."""
    app.connect("source-read", lambda app, page, source: source.__setitem__(0, adapted(page, source[0])))
    app.connect("env-get-outdated", lambda *_: [*OF_THE_ROOT, "reference"])


def adapted(page: str, text: str) -> str:
    """Return the source of a page for the site: with files of the root and the reference in their places."""
    if page in OF_THE_ROOT:
        lists = f"\n## {text.partition(chr(10) + '## ')[2]}" if page == "index" else ""
        text = (ROOT / OF_THE_ROOT[page]).read_text().replace("](docs/", "](") + lists
    if REFERENCE in text:
        from tests.reference import sections  # only here: it imports the package

        text = text.replace(REFERENCE, sections())
    for shown, file in OF_THE_ROOT.items():
        for link, place in ((file, ""), (f"../{file}", ""), (f"../../{file}", "../")):
            text = text.replace(f"]({link}", f"]({place}{shown}.md")
    return text
