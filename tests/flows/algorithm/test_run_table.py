"""The runs below a folder as one table: what differs, how far each is, and how well it does."""

import json
from datetime import UTC, datetime

import pytest

from prefect_rlhf import runs
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.installed import OwnVersion
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.forms.parameters_file import changed
from prefect_rlhf.tasks.reporting.run_record import OWNER, keep_parameters, new_record, recorded

pytestmark = pytest.mark.quick

GIVEN = {
    "actor": {"path": "models/smollm2"},
    "reward": None,
    "algo": {"batch_size": 8, "optimizer": {"lr": 1e-5}},
    "output_dir": "runs",
    "steps": 3,
}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_run(folder, algorithm="grpo", error=None, rewards=(0.1, 0.2, 0.3), evaluated=True, **changes):
    """A run as it leaves its folder; with an error it has fewer steps, and no result."""
    folder.mkdir(parents=True)
    (folder / OWNER).write_text("an id")
    record = new_record(algorithm, "prefect-rlhf run", OwnVersion("0.1.0", None), steps=3)
    keep_parameters(folder, record, {**GIVEN, "output_dir": str(folder.parent), **changes}, changed)
    metrics = [{"step": n, "advantages.score": reward, "advantages.kl": 0.5} for n, reward in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text(lines(*metrics))
    if evaluated:
        (folder / "evaluation.jsonl").write_text(lines({"step": 0, "evaluation.score": 0.5}))
    try:
        with recorded(folder, record):
            if error is not None:
                raise error
            result = {"run_dir": str(folder), "models": {}, "best": {"metric": "m", "value": 0.25, "step": 1}}
            (folder / "result.json").write_text(json.dumps(result))
    except InvalidInput:
        pass
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two runs of a sweep, one that failed, one in a folder below; and what belongs to none."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a")
    slower = {"batch_size": 8, "optimizer": {"lr": 1e-6}}
    write_run(tmp_path / "runs" / "b", algo=slower, error=InvalidInput("plan", "p", "a plan"), rewards=(0.1,))
    write_run(tmp_path / "runs" / "other" / "c", "sft", evaluated=False, steps=4, reward=1)
    (tmp_path / "runs" / "latest").symlink_to("a")
    (tmp_path / "runs" / "logs").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    return tmp_path / "runs"


def test_a_row_has_the_state_the_steps_and_what_differs(folder):
    table = runs(folder)
    assert [row["run"] for row in table] == ["runs/a", "runs/b", "runs/other/c"]
    a, b, c = table
    assert list(a) == [
        *("run", "algorithm", "state", "why", "steps", "of", "began"),
        *("parameters.reward", "algo.optimizer.lr", "reward", "kl", "held_out_reward", "best", "best_step"),
    ]
    assert (a["state"], a["steps"], a["of"], a["why"]) == ("completed", 3, 3, None)
    assert (b["state"], b["steps"], b["why"]) == ("failed", 1, "plan: got 'p', expected a plan")
    assert (a["algo.optimizer.lr"], b["algo.optimizer.lr"]) == (1e-5, 1e-6)
    assert (a["reward"], a["kl"], a["held_out_reward"], a["best"], a["best_step"]) == (0.3, 0.5, 0.5, 0.25, 1)
    assert c["algorithm"] == "sft" and c["held_out_reward"] is None
    assert "algo.batch_size" not in a and "output_dir" not in a
    assert (datetime.now(UTC) - a["began"]).total_seconds() < 600


def test_the_rows_are_frozen_and_plain_enough_for_a_data_frame(folder):
    """pandas takes a sequence of mappings with the same keys."""
    table = runs(folder)
    with pytest.raises(TypeError):
        table[0]["state"] = "failed"
    assert isinstance(table, tuple) and len({tuple(row) for row in table}) == 1


def test_it_is_a_table_in_a_terminal_and_in_a_notebook(folder):
    text = str(runs(folder))
    heads, first, second, third = text.splitlines()
    assert heads.split()[:5] == ["run", "algorithm", "state", "why", "steps"]
    assert first.startswith("runs/a ") and "1e-05" in first and "plan: got 'p'" in second
    write_run(folder / "<b>")
    html = runs(folder)._repr_html_()
    assert "<td>runs/&lt;b&gt;</td>" in html and "runs/<b>" not in html


def test_an_empty_list_is_an_empty_cell(folder):
    """Most runs change nothing when they resume."""
    write_run(folder / "more" / "plain", resume_changes=[])
    write_run(folder / "more" / "changed", resume_changes=["algo.optimizer.lr"])
    table = runs(folder / "more")
    assert sorted(row["resume_changes"] for row in table) == [[], ["algo.optimizer.lr"]]
    assert "['algo.optimizer.lr']" in str(table) and "[]" not in str(table)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("run.json", "{", "run_dir: got 'runs/a/run.json', expected the record that a run writes into its folder"),
        ("run.json", None, "run_dir: got 'runs/a/run.json', expected the record that a run writes into its folder"),
        ("run.json", '{"algorithm": 1}', "run_dir: got 'runs/a/run.json', expected the record"),
        ("parameters.yaml", "a: [", "run_dir: got 'runs/a/parameters.yaml', expected YAML or JSON"),
        ("parameters.yaml", "- 1", "run_dir: got 'runs/a/parameters.yaml', expected the parameters"),
        ("metrics.jsonl", "no json\n", "metrics.jsonl: got 'runs/a/metrics.jsonl', expected JSON lines"),
        ("result.json", "[]", "output_dir: got 'runs/a/result.json', expected the result that the run wrote"),
    ],
)
def test_a_broken_folder_is_skipped_with_a_line(folder, file, text, says, capsys):
    (folder / "a" / file).unlink() if text is None else (folder / "a" / file).write_text(text)
    table = runs("runs")
    assert [row["run"] for row in table] == ["runs/b", "runs/other/c"]
    (line,) = table.skipped
    assert line.startswith(f"runs/a: {says}") and "\n" not in line
    assert str(table).splitlines()[-1] == f"skipped: {line}"
    assert main(["runs"]) == 0
    told = capsys.readouterr()
    assert told.err == f"skipped: {line}\n" and "runs/b" in told.out and "skipped" not in told.out


def test_a_missing_folder_is_refused_and_an_empty_folder_has_no_runs(tmp_path, capsys):
    with pytest.raises(InvalidInput, match="folder: got '/nowhere', expected a folder of runs"):
        runs("/nowhere")
    assert len(runs(tmp_path)) == 0 and str(runs(tmp_path)) == "no runs"
    assert main(["runs", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("prefect-rlhf: folder: got '/nowhere'")
