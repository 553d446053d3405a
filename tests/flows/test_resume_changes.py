"""A run that goes on with another learning rate: the moments are kept, and the change is on record."""

import json
from importlib.metadata import version

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.sft import sft
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.plans.plan_file import read_plan
from tests.support.finished_steps import write_checkpoint
from tests.support.runs import completed, prepared, read_lines, whole
from tests.support.tiny import make_model
from tests.tasks.data.stored import json_lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]

HALF, STEPS = 2, 4
RISES_LONG = {"lr": 4e-3, "warmup_steps": STEPS}
RISES_TO_HALF = {"lr": 2e-3, "warmup_steps": HALF}
"""The same rates in the first two steps, bit for bit: a quarter and a half of 4e-3."""
WORDS = {"actor_train": {"micro_batches": 2}}
"""A word of a placement, which every run here has."""
NAMES = "algo.optimizer.lr,algo.optimizer.warmup_steps"
ONE_DEVICE = whole(ClusterShape("desk", num_nodes=1, devices_per_node=1, device_memory_bytes=8 << 30))


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """SFT on a few answers."""
    folder = tmp_path_factory.mktemp("changes")
    answers = ("the best film", "a bad film", "it is good", "the film is bad")
    rows = [{"prompt": "what is it", "completion": text, "split": "train"} for text in answers]
    path = json_lines(folder / "chats.jsonl", *rows, {**rows[0], "split": "held_out"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        yield {
            "chats": {"path": path},
            "held_out": {"path": path, "split": "held_out"},
            "actor": {"path": make_model(folder / "actor"), "dtype": "float32"},
            "checkpoint_every": HALF,
            "output_dir": str(folder / "runs"),
            "placement": WORDS,
        }


def given(parameters, optimizer, **changes):
    return parameters | {"algo": {"batch_size": 2, "evaluate_every": 9, "optimizer": optimizer}} | changes


@pytest.fixture(scope="module")
def half(parameters):
    """Two steps at the lower rate."""
    return completed(sft, given(parameters, RISES_TO_HALF, steps=HALF))


@pytest.fixture(scope="module")
def resumed(parameters, half):
    """Two more at the higher rate."""
    return completed(
        sft, given(parameters, RISES_LONG, steps=STEPS, resume_from=str(half), resume_changes=NAMES.split(","))
    )


@pytest.mark.all  # tests/tasks/checkpoints/test_changes.py
def test_a_run_resumed_at_another_rate_is_bit_for_bit_the_run_whose_rate_changed_on_the_way(parameters, resumed):
    """So the moments, the bias correction and the order of rows are those of the checkpoint."""
    reference = completed(sft, given(parameters, RISES_LONG, steps=STEPS))
    rates, losses = (
        [[step[f"actor_train.{name}"] for step in read_lines(run / "metrics.jsonl")] for run in (reference, resumed)]
        for name in ("learning_rate", "loss")
    )
    assert rates[0] == rates[1] == [1e-3, 2e-3, 3e-3, 4e-3]
    assert losses[0] == losses[1]
    one, other = ((run / "actor" / "model.safetensors").read_bytes() for run in (reference, resumed))
    assert one == other
    assert f"`sft` of prefect-rlhf {version('prefect-rlhf')}" in (resumed / "actor" / "README.md").read_text()


def test_a_resumed_run_keeps_the_words_of_placements_or_takes_others(parameters, resumed):
    """The runs above are bit for bit alike with the word; a plan's words are none of the checkpoint's parameters."""
    assert read_plan(resumed / "plan.yaml", ONE_DEVICE.cluster)["actor_train"].micro_batches == 2
    again = given(parameters, RISES_LONG, steps=STEPS + 1, resume_from=str(resumed))
    for word in (2, 1):
        words = {"placement": {"actor_train": {"micro_batches": word}}}
        assert prepared(sft, again | words, ONE_DEVICE).augmented.plan["actor_train"].micro_batches == word


def test_a_change_is_in_the_run_folder_and_in_every_later_checkpoint(parameters, resumed, caplog):
    """A resume of the resumed run goes on with the new rate without naming it, and logs the change."""
    values = {"algo.optimizer.lr": (2e-3, 4e-3), "algo.optimizer.warmup_steps": (HALF, STEPS)}
    changes = [{"step": HALF, "parameter": key, "before": a, "now": b} for key, (a, b) in values.items()]
    assert json.loads((resumed / "changes.json").read_text()) == changes
    again = given(parameters, RISES_LONG, steps=STEPS + 1, resume_from=str(resumed))
    for named in ("", NAMES):
        ready = prepared(sft, again | ({"resume_changes": named} if named else {}), ONE_DEVICE)
        assert [str(change) for change in ready.request.lineage.changes] == [
            "after 2 steps: algo.optimizer.lr 0.002 -> 0.004",
            "after 2 steps: algo.optimizer.warmup_steps 2 -> 4",
        ]
    assert "after 2 steps: algo.optimizer.lr 0.002 -> 0.004" in caplog.text


def test_the_earlier_rate_is_refused_by_its_own_name_after_a_change(parameters, resumed):
    back = given(parameters, RISES_TO_HALF, steps=STEPS + 1, resume_from=str(resumed))
    says = (
        r"^algo\.optimizer\.lr: got 0\.002, expected 0\.004, as in the checkpoint step-000004 \(changed after 2 steps\)"
    )
    with pytest.raises(InvalidInput, match=says):
        prepared(sft, back, ONE_DEVICE)


def test_a_rate_that_falls_over_all_steps_falls_longer_only_if_the_run_says_so(parameters, tmp_path):
    """More steps change `decay_steps` too, which no one has set: the error and the option have its name."""
    falls = {"lr": 2e-3, "warmup_steps": 1, "schedule": "linear"}
    before = prepared(sft, given(parameters, falls, steps=STEPS), ONE_DEVICE)
    lineage = before.request.lineage
    folder = write_checkpoint(before.augmented, tmp_path / "run", HALF, every=HALF, lineage=lineage)
    longer = given(parameters, falls, steps=2 * STEPS, resume_from=str(folder))
    name = "algo.optimizer.decay_steps"
    says = rf"^{name}: got {2 * STEPS}, expected {STEPS}, as in the checkpoint .*, add -p resume_changes={name}$"
    with pytest.raises(InvalidInput, match=says):
        prepared(sft, longer, ONE_DEVICE)
    kept = prepared(sft, given(longer, falls | {"decay_steps": STEPS}), ONE_DEVICE).request
    assert kept.graph.model("actor").optimizer.decay_steps == STEPS and kept.lineage.changes == ()
    changed = prepared(sft, longer | {"resume_changes": name}, ONE_DEVICE).request
    assert changed.graph.model("actor").optimizer.decay_steps == 2 * STEPS
    assert [str(change) for change in changed.lineage.changes] == [f"after {HALF} steps: {name} {STEPS} -> {2 * STEPS}"]


def test_a_change_without_a_checkpoint_is_refused(parameters):
    says = r"^resume_changes: 'algo\.optimizer\.lr' is not used: only a resumed run .*; remove it, or set resume_from$"
    with pytest.raises(InvalidInput, match=says):
        prepared(sft, given(parameters, RISES_LONG, resume_changes="algo.optimizer.lr"), ONE_DEVICE)
