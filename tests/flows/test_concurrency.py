"""Whole runs in miniature in which two task runs wait for each other in their ranks: they end only if both run at once.

Real Prefect, Megatron-core and vLLM on tiny models. A run that puts one after the other fails after LIMIT_SECONDS.
"""

import json
import os
import time
from pathlib import Path

import pytest

from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.tasks.running import train as session
from tests.support.plan_matrix import ALONE
from tests.support.runs import completed, plan_file, read_lines, whole

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("prefect")]

LIMIT_SECONDS = 60.0
FOLDER = "TEST_MEETINGS"  # environment variable: where ranks meet
PAIRS = "TEST_PAIRS"  # JSON: who meets whom, as [one, other]; each is method.who@step


class MeetingRank(Rank):
    """A rank on which some calls begin by waiting until another call, here or on another rank, has begun as well."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self._folder, self._pairs = Path(os.environ[FOLDER]), json.loads(os.environ[PAIRS])

    def generate(self, order):
        self._meet(f"generate.{order.call.name}@{order.step}")
        return super().generate(order)

    def inference(self, order):
        self._meet(f"inference.{order.call.name}@{order.step}")
        return super().inference(order)

    def train_step(self, order):
        self._meet(f"train_step.{order.call.name}@{order.step}")
        return super().train_step(order)

    def reload(self, instance, *arguments):
        count = len(list(self._folder.glob(f"count.{instance.role}.*")))
        (self._folder / f"count.{instance.role}.{count}").touch()
        self._meet(f"reload.{instance.role}@{count + 1}")
        report = super().reload(instance, *arguments)
        self._note_visitors()
        return report

    def offload(self, instance, part="all", *arguments):
        (self._folder / f"comes_and_goes.{instance.role}.{part}").touch()
        return super().offload(instance, part, *arguments)

    def _meet(self, name):
        (self._folder / name).touch()
        for other in [pair[1 - pair.index(name)] for pair in self._pairs if name in pair]:
            end = time.monotonic() + LIMIT_SECONDS
            while not (self._folder / other).exists():
                if time.monotonic() > end:
                    raise RlhfError(f"{name} ran {LIMIT_SECONDS:g} s without {other}")
                time.sleep(0.01)

    def _note_visitors(self):
        """How many of the instances that come and go are on the device now, as a file."""
        roles = {file.name.split(".")[1] for file in self._folder.glob("comes_and_goes.*")}
        present = [i for i, model in self.models.items() if i.engine == "megatron" and not model.offloaded]
        (self._folder / f"visitors.{sum(instance.role in roles for instance in present)}").touch()


@pytest.fixture
def run(parameters, monkeypatch, tmp_path):
    """Run PPO on so many devices while pairs meet; its spans by node."""

    def run_ppo(num_devices, *pairs, **changes):
        lease = whole(ClusterShape("test", 1, num_devices, 8 << 30))
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, lease.to_json())
        monkeypatch.setenv(FOLDER, str(tmp_path))
        monkeypatch.setenv(PAIRS, json.dumps(pairs))
        monkeypatch.setattr(session, "Rank", MeetingRank)
        run_dir = completed(ppo, parameters | changes)
        for pair in pairs:
            assert all((tmp_path / name).exists() for name in pair), f"{pair} never met"
        return {span["node"]: span for span in read_lines(run_dir / "task_runs.jsonl")}

    return run_ppo


def overlap(one, other):
    return one["start"] < other["end"] and other["start"] < one["end"]


def test_a_reload_overlaps_with_a_call_on_the_same_device(run, tmp_path):
    """The reference comes back while the reward model infers; it and the actor's optimizer take turns on the device."""
    visits = ALONE | dict.fromkeys(("actor_generate", "actor_evaluation"), "0 engine=vllm")
    visits |= {"ref_inference": "0 engine=megatron offload=all", "actor_train": "0 engine=megatron offload=optimizer"}
    plan = str(plan_file(visits, tmp_path / "visits.json"))
    spans = run(1, ("reload.ref@1", "inference.reward_inference@1"), plan=plan)
    assert overlap(spans["reload.ref.megatron@1"], spans["reward_inference@1"])
    assert (tmp_path / "visitors.1").exists() and not (tmp_path / "visitors.2").exists()
    away, back = spans["offload.actor.megatron.optimizer@1"], spans["reload.actor.megatron.optimizer@2"]
    assert away["device_bytes"]["0"] < back["device_bytes"]["0"]


def test_both_train_steps_of_split_run_at_once_in_every_step(run):
    pairs = [(f"train_step.actor_train@{step}", f"train_step.critic_train@{step}") for step in (1, 2)]
    spans = run(2, *pairs, plan="split")
    assert all(overlap(spans[f"actor_train@{step}"], spans[f"critic_train@{step}"]) for step in (1, 2))


def test_a_critic_trains_while_the_next_responses_are_made_with_fresh_weights(run):
    """The actor's new weights leave the devices of both train_steps before the critic trains there."""
    spans = run(2, ("train_step.critic_train@1", "generate.actor_generate@2"), plan="separation", steps=3)
    assert overlap(spans["critic_train@1"], spans["actor_generate@2"])
    assert [spans[f"actor_generate@{step}"]["reads"] for step in (1, 2, 3)] == [0, 1, 2]


def test_with_staleness_the_next_responses_are_made_while_this_step_trains(run):
    """Each generate but the first overlaps a train_step, on weights one step older; evaluation has the newest."""
    pairs = [(f"train_step.actor_train@{step}", f"generate.actor_generate@{step + 1}") for step in (1, 2)]
    spans = run(2, *pairs, plan="separation", staleness=1, steps=3)
    for step in (1, 2):
        assert overlap(spans[f"actor_train@{step}"], spans[f"actor_generate@{step + 1}"])
    assert [spans[f"actor_generate@{step}"]["reads"] for step in (1, 2, 3)] == [0, 0, 1]
    assert [(spans[f"actor_train@{step}"]["reads"], spans[f"actor_train@{step}"]["writes"]) for step in (1, 2, 3)] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]
    assert [spans[f"actor_evaluation@{step}"]["reads"] for step in (0, 2, 3)] == [0, 2, 3]
