"""The site of the documentation is built without a warning, and its reference shows every public name."""

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import prefect_rlhf
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.commands.graph import read_graph
from tests.door import public_names
from tests.reference import examples, sections

PROJECT = Path(__file__).parents[2]
EXAMPLES = examples()


def build(docs, site, *more):
    """Sphinx with the options of `make docs`."""
    (options,) = re.findall(r"^SITE := (.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    options = options.replace("build/doctrees", str(site / "doctrees")).split()
    command = [sys.executable, "-m", "sphinx", *options, *more, str(docs), str(site / "html")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_site_is_built_without_a_warning(tmp_path):
    """Links, anchors and pictures of every page resolve, and each page is reached; the files of the root count too."""
    built = build(PROJECT / "docs", tmp_path)
    assert built.returncode == 0, built.stderr
    pages = {page.stem for page in (PROJECT / "docs").glob("*.md")}
    assert pages <= {page.stem for page in (tmp_path / "html").glob("*.html")}
    shown = (tmp_path / "html" / "reference.html").read_text()
    assert all(f"<h3>{name}<" in shown for name in public_names())


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("[a page](nowhere.md)", "cross-reference target not found: 'nowhere.md'"),
        ("[an anchor](other.md#nowhere)", "local id not found in doc 'other': 'nowhere'"),
        ("[an anchor here](#nowhere)", "cross-reference target not found: 'nowhere'"),
        ("![a picture](nowhere.png)", "image file not readable: nowhere.png"),
        ("", "document isn't included in any toctree"),
    ],
)
def test_a_link_that_does_not_resolve_fails_the_build(tmp_path, line, warning):
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(PROJECT / "docs" / "conf.py", docs)
    (docs / "start.md").write_text(f"# Start\n{line}\n\n```{{toctree}}\nother\n```\n")
    (docs / "other.md").write_text("# Other\n")
    if not line:
        (docs / "alone.md").write_text("# Alone\n")
    built = build(docs, tmp_path, "--define", "root_doc=start")
    assert built.returncode != 0
    assert warning in built.stderr


def test_each_public_name_has_an_example():
    assert EXAMPLES.keys() == public_names().keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_shows_and_its_flows_are_algorithms(name, tmp_path, monkeypatch):
    """Each flow of an example is traced to its graph, as `prefect-rlhf graph` does."""
    monkeypatch.chdir(tmp_path)
    words = {"rl": prefect_rlhf, "torch": torch, "__name__": "docs"}
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name] + "\n", words, name, "door.txt", 0)
    complaints = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=complaints.append, clear_globs=False)
    assert result.attempted > 0
    assert result.failed == 0, "".join(complaints)
    for flow in example.globs.values():
        if isinstance(flow, AlgorithmFlow):
            assert len(read_graph(flow, flow.algorithm.name, {}).calls) > 0


def test_the_reference_has_signature_result_and_fields():
    """A function, an algorithm, a loss, a computation and settings, with their types and defaults."""
    text = sections()
    for line in (
        "    batch_size: int | None = None,",
        "**Returns** `RowsHandle`.",
        "    algo: GRPO = GRPO(),",
        "**Returns** a term of a `train_step`. The model computes `logprobs` for it.",
        "**Returns** a handle of rows with the keys `advantages`, `returns`, `row_weights`.",
        r"| `value_clip` | `float \| None` | `0.2` | above 0, at most 1,000,000 | Values are clipped to this",
        "### RunOptions",
    ):
        assert line in text
