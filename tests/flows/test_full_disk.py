"""A disk that fills up, turns read-only or breaks under a run: it ends as failed, in one line that says which file.

Each on a small file system of its own (so only for root), in which everything that a run writes is.
"""

import os
import shutil

import pytest

from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training import run as training
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from prefect_rlhf.tasks.running.journal import Journal
from tests.support.cases import first
from tests.support.plan_matrix import ALONE
from tests.support.runs import end, leased, plan_file
from tests.support.small_disk import break_disk, breakable_disk, fill, make_read_only, small_disk
from tests.support.tiny import ppo_parameters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems"),
]
DISK_BYTES = 16 << 20


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """Of two steps with a checkpoint after each, on one device without a gang."""
    folder = tmp_path_factory.mktemp("full_disk")
    given = ppo_parameters(folder) | {"plan": str(plan_file(ALONE, folder / "alone.json")), "checkpoint_every": 1}
    return given | {"algo": given["algo"] | {"evaluate_every": 1}}


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "runs", DISK_BYTES) as folder:
        yield folder


BROKEN = ("Input/output error", "No space left on device", "Read-only file system")
"""What Linux says of blocks that it cannot write, as it meets them one way or another."""
HARMS = {"full": (fill, "No space left on device"), "read-only": (make_read_only, "Read-only file system")}


def ended(parameters, disk):
    """The state in which PPO ends."""
    with leased(1):
        return end(ppo, parameters | {"output_dir": str(disk)})


NODES = (
    "actor_generate@1",  # after whose end the journal is written
    pytest.param("record_rollouts@1", marks=pytest.mark.all),
    pytest.param("record_evaluation@1", marks=pytest.mark.all),
    pytest.param("checkpoint.critic@1", marks=pytest.mark.all),
    "commit@2",
    pytest.param("export.actor@2", marks=pytest.mark.all),
)


def before(monkeypatch, node, harm):
    """Let a run do harm to itself as it comes to a node."""
    execute = Dispatcher.execute

    def harmed(self, planned):
        if planned.id == node:
            harm()
        return execute(self, planned)

    monkeypatch.setattr(Dispatcher, "execute", harmed)


@pytest.mark.parametrize("harm", [pytest.param("full", id="full"), pytest.param("read-only", marks=pytest.mark.all)])
@pytest.mark.parametrize("node", NODES)
def test_a_disk_that_ends_while_a_run_writes_ends_the_run(parameters, disk, monkeypatch, harm, node):
    """Whatever it is about to write: the journal, rollouts, a checkpoint's shards and manifest, a trained model."""
    do, reason = HARMS[harm]
    before(monkeypatch, node, lambda: do(disk))
    state = ended(parameters, disk)
    assert state.is_failed(), state
    assert reason in state.message and "\n" not in state.message
    if harm == "full":  # nothing can be removed from a read-only disk
        assert not list(disk.glob("*/checkpoints/*.part"))


@pytest.mark.all
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="no tool that makes a file system")
@pytest.mark.parametrize("node", ["actor_generate@1", "checkpoint.critic@1", "export.actor@2"])
def test_a_disk_that_breaks_ends_the_run_when_it_is_next_flushed(parameters, tmp_path, monkeypatch, node):
    """At the latest when a checkpoint or a trained model is: Linux tells of an I/O error then."""
    with breakable_disk(tmp_path / "runs", 4 * DISK_BYTES) as disk:
        before(monkeypatch, node, lambda: break_disk(disk))
        state = ended(parameters, disk)
    assert state.is_failed(), state
    assert any(reason in state.message for reason in BROKEN), state.message
    assert str(tmp_path / "runs") in state.message and "\n" not in state.message


@pytest.mark.parametrize("harm", first(1, HARMS))
def test_a_disk_that_ends_before_the_first_step_ends_the_run(parameters, disk, monkeypatch, harm):
    """The files that say what was decided: plan, certificate, predicted timeline."""
    do, reason = HARMS[harm]
    keep = Journal.keep

    def harmed(self, name, text):
        do(disk)
        keep(self, name, text)

    monkeypatch.setattr(Journal, "keep", harmed)
    state = ended(parameters, disk)
    assert state.is_failed() and reason in state.message and "plan.yaml" in state.message


@pytest.mark.all
def test_a_failed_link_ends_the_run_after_its_models_are_written(parameters, disk, monkeypatch):
    report = training.RunReport.finished

    def harmed(self):
        report(self)
        make_read_only(disk)

    monkeypatch.setattr(training.RunReport, "finished", harmed)
    state = ended(parameters, disk)
    assert state.is_failed() and "latest" in state.message and "Read-only" in state.message
    assert list(disk.glob("*/actor/model.safetensors"))


def test_no_option_writes_outside_the_output_folder():
    """All that a run writes is in its output folder; a new option that names a place belongs into the cases above."""
    places = {name for name, field in RunOptions.model_fields.items() if "folder" in (field.description or "").lower()}
    assert places == {"resume_from", "output_dir"}
