"""The notebooks of docs/notebooks, as a person runs them: all cells in the folder of the first commands."""

import json
import re
from pathlib import Path

import pytest

from prefect_rlhf.flows.commands.init import project, write_new
from tests.answers import NOTEBOOK
from tests.support.runs import environment
from tests.support.tiny import make_model

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
TRAINS, READS = "grpo_with_your_reward.ipynb", "results.ipynb"
LIMIT_SECONDS = 500


def cells(name):
    return json.loads((FOLDER / name).read_text())["cells"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that the first commands make, with a small model."""
    write_new(tmp_path, project(tmp_path))
    make_model(tmp_path / "models" / "smollm2")
    for variable, value in environment(HOME=str(tmp_path)).items():
        monkeypatch.setenv(variable, value)
    return tmp_path


def executed(folder, name):
    """What each code cell shows: its printed text, and the kinds of its results."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=LIMIT_SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shown(outputs, kind):
    """What a cell shows in this kind of data."""
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.usefixtures("prefect")
@pytest.mark.timeout(1200)
def test_the_notebooks_train_with_a_reward_show_curve_and_samples_and_read_the_results(folder):
    _, scores, run, curve, samples = executed(folder, TRAINS)
    assert shown(scores, "text/plain") == ["[0.96, -0.04, -0.16]"]
    assert str(folder / "runs" / "notebook") in shown(run, "text/plain")[-1]
    assert shown(curve, "image/png")
    assert all(word in shown(samples, "text/html")[-1] for word in ("prompt", "response", "reward"))

    rows, by_prompt, by_step, _, both, means = executed(folder, READS)
    assert "truncated" in shown(rows, "text/html")[-1]
    assert "deviation" in shown(by_prompt, "text/html")[-1]
    assert "length" in shown(by_step, "text/html")[-1]
    assert "change" in shown(both, "text/html")[-1]
    assert "reward_after" in shown(means, "text/plain")[-1]


def test_every_link_of_a_notebook_leads_to_a_file():
    for name in (TRAINS, READS, NOTEBOOK.name):
        text = "".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "markdown")
        for link in re.findall(r"\]\(([^)#]+)", text):
            assert link.startswith("https://") or (FOLDER / link).exists(), (name, link)


def test_no_notebook_is_without_a_reader():
    pages = "".join(page.read_text() for page in FOLDER.parent.glob("*.md"))
    for notebook in FOLDER.glob("*.ipynb"):
        assert f"(notebooks/{notebook.name})" in pages, notebook.name
