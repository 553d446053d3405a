"""A second set of weights, added to a model by an entry of a table alone: nothing else knows of it.

Engines compute nothing (see row_world). Controller, rank, files and certificate are those of a run.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from prefect_rlhf.engines.engine import StatePart
from prefect_rlhf.engines.gang.in_process import InProcessGang
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.errors.errors import InvalidInput, StaleWeights
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.models import weights as of_models
from prefect_rlhf.placement.models.weights import Parameter, Part
from prefect_rlhf.placement.plan import instances
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.tasks.checkpoints.folders import folder_of, read_checkpoint
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from tests.support.strategies import GIB, ppo
from tests.tasks import row_world

BONUS = Parameter("bonus.weight", (64, 8))
ONE = ClusterShape("one", 1, 1, 8 * GIB)
STEPS = 3


TRAINED, FROZEN = "/models/second weights", "/models/frozen second weights"
SECOND = Part(
    parameters=lambda model: [BONUS] if model.path in (TRAINED, FROZEN) else [],
    learns=lambda model: model.path != FROZEN,
)
"""The entry of the table. A train_step leaves frozen weights as they are, as the base below an adapter."""


def with_second(graph, path=TRAINED):
    """The graph whose actor has the second weights."""
    of_actor = replace(graph.model("actor"), path=path)
    return replace(graph, models=tuple(of_actor if each.role == "actor" else each for each in graph.models))


class TrainedEngine(row_world.KnowingEngine):
    """Adds 1 to its trained weights in each step; all moments are 0."""

    def __init__(self, command, rank):
        super().__init__(command, rank)
        self.num_updates, self._frozen = 0, command.frozen

    def train(self, rows, settings):
        before = {name: self.shards[name].view.clone() for name in self._frozen}
        metrics = super().train(rows, settings)
        for name, values in before.items():
            self.shards[name].view.copy_(values)
        self.num_updates += 1
        return metrics

    def state_parts(self):
        for name, shard in self.shards.items():
            if name not in self._frozen:
                main = shard.view.float().flatten()
                yield StatePart("main", name, shard.region, main)
                for kind in ("exp_avg", "exp_avg_sq") if self.num_updates else ():
                    yield StatePart(kind, name, shard.region, torch.zeros_like(main))

    def begin_after(self, num_updates):
        self.num_updates = num_updates

    def close(self):
        self.shards = {}


class Made:
    """A run whose actor has the second weights, on one rank."""

    def __init__(self, folder, path=TRAINED, **more):
        graph = row_world.with_operations(with_second(ppo(), path))
        plan = preset("flattening", graph, ONE, ONE.whole)
        self.run = replace(row_world.training_run(graph, plan, STEPS, folder), checkpoint_every=1, **more)
        self.rank = None
        self.gang = InProcessGang(self._rank)
        self.dispatcher = Dispatcher(self.run, self.gang)

    def _rank(self, rank, size):
        self.rank = Rank(rank, size, TrainedEngine)
        return self.rank

    def build(self):
        self.dispatcher.build(lambda instance, outcome: None)
        return self

    def step(self, step):
        for node in row_world.whole_graph(self.run).of_step(step):
            if node.kind != "export":
                self.dispatcher.execute(node)
        self.dispatcher.finish_step(step, oldest=step + 1)

    def bonus(self, engine) -> torch.Tensor:
        (instance,) = (each for each in self.rank.models if (each.role, each.engine) == ("actor", engine))
        return self.rank.models[instance].engine.shards["bonus.weight"].view

    def versions(self, name):
        return sorted(v for other, v in self.dispatcher.fingerprints._learned if other == name)


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setitem(of_models.PARTS, "bonus", SECOND)
    run = Made(tmp_path / "run").build()
    yield run
    run.gang.close()


@pytest.fixture
def frozen(tmp_path, monkeypatch):
    monkeypatch.setitem(of_models.PARTS, "bonus", SECOND)
    run = Made(tmp_path / "run", FROZEN).build()
    yield run
    run.gang.close()


def test_second_weights_are_versioned_and_moved_with_the_model(made):
    made.step(1)
    assert made.versions("actor.bonus") == made.versions("actor.trunk") == [0, 1]
    assert made.bonus("megatron").unique().tolist() == [1], "it is trained"
    assert made.bonus("vllm").unique().tolist() == [0], "it generated before"
    made.step(2)
    assert made.bonus("megatron").unique().tolist() == [2]
    assert made.bonus("vllm").unique().tolist() == [1], "the reallocation of step 2 brought it"


def test_a_write_to_second_weights_between_two_calls_is_seen(made):
    made.step(1)
    made.bonus("megatron").add_(1)
    with pytest.raises(StaleWeights, match=r"is labelled v1, but bonus\.weight was written"):
        made.step(2)


def test_second_weights_have_a_folder_in_a_checkpoint_and_come_back_from_it(made, tmp_path):
    made.step(1)
    made.step(2)
    folder = folder_of(made.run.run_dir, 2)
    stored = load_file(folder / "actor.bonus" / "shard-00000.safetensors")
    place = "bonus.weight [0:64,0:8]"
    found = {key: values.unique().tolist() for key, values in stored.items()}
    assert found == {f"main {place}": [2], f"exp_avg {place}": [0], f"exp_avg_sq {place}": [0]}
    checkpoint = read_checkpoint(folder)
    assert checkpoint.manifest.shards.keys() == {"actor.trunk", "actor.bonus", "critic.trunk", "critic.scalar_head"}
    assert checkpoint.manifest.fingerprints["actor.bonus"].keys() == {"bonus.weight"}
    resumed = Made(tmp_path / "later", checkpoint=checkpoint).build()
    assert resumed.bonus("megatron").unique().tolist() == [2]
    resumed.step(3)
    assert resumed.bonus("vllm").unique().tolist() == [2]
    assert resumed.bonus("megatron").unique().tolist() == [3]


def test_a_checkpoint_with_a_damaged_shard_of_second_weights_names_them(made):
    made.step(1)
    (folder_of(made.run.run_dir, 1) / "actor.bonus" / "shard-00000.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"checkpoint\.actor\.bonus: .*of bonus\.weight"):
        read_checkpoint(folder_of(made.run.run_dir, 1))


def test_frozen_second_weights_keep_version_0_and_are_neither_moved_nor_checkpointed(frozen, tmp_path):
    moved = []
    reallocate = frozen.rank.reallocate
    frozen.rank.reallocate = lambda command: moved.append(command.target_layout.shapes) or reallocate(command)
    for step in (1, 2):
        frozen.step(step)
    assert moved and all("bonus.weight" not in shapes for shapes in moved)
    assert frozen.versions("actor.bonus") == [0] and frozen.versions("actor.trunk") == [1, 2]
    assert frozen.bonus("megatron").unique().tolist() == [0]
    folder = folder_of(frozen.run.run_dir, 2)
    assert not (folder / "actor.bonus").exists()
    manifest = json.loads((folder / "checkpoint.json").read_text())["manifest"]
    assert manifest["fingerprints"]["actor.bonus"] == {"bonus.weight": 0}
    resumed = Made(tmp_path / "later", FROZEN, checkpoint=read_checkpoint(folder)).build()
    resumed.step(3)
    frozen.bonus("megatron").add_(1)
    with pytest.raises(StaleWeights, match=r"is labelled v0, but bonus\.weight was written"):
        frozen.step(3)


def test_changed_frozen_second_weights_are_refused_on_resuming(frozen, tmp_path, monkeypatch):
    frozen.step(1)

    class Other(TrainedEngine):
        def __init__(self, command, rank):
            super().__init__(command, rank)
            if "bonus.weight" in self.shards:
                self.shards["bonus.weight"].view.fill_(7)

    monkeypatch.setattr(f"{__name__}.TrainedEngine", Other)
    later = Made(tmp_path / "later", FROZEN, checkpoint=read_checkpoint(folder_of(frozen.run.run_dir, 1)))
    with pytest.raises(InvalidInput, match="a checkpoint of a run with other weights of actor"):
        later.build()


@pytest.mark.parametrize(("path", "trained"), [(TRAINED, True), (FROZEN, False)])
def test_second_weights_go_along_when_a_run_switches_to_another_plan(tmp_path, monkeypatch, path, trained):
    """All instances end, and are built anew: trained weights come from host memory, frozen ones from the folder."""
    monkeypatch.setitem(of_models.PARTS, "bonus", SECOND)
    made = Made(tmp_path / "run", path).build()
    made.step(1)
    made.step(2)
    engines = {model.engine for model in made.rank.models.values()}
    faster = replace(made.run.plan, cluster=replace(ONE, node_speeds=(2.0,)))
    before, made.run = made.dispatcher, made.run.under(faster, 3)
    made.dispatcher = Dispatcher(made.run, made.gang, before)
    made.dispatcher.switch_from(before, lambda instance, outcome: None)
    assert not engines & {model.engine for model in made.rank.models.values()}
    assert made.bonus("megatron").unique().tolist() == [2 if trained else 0]
    made.step(3)
    assert made.bonus("megatron").unique().tolist() == [3 if trained else 0]
    made.gang.close()


@pytest.mark.parametrize(
    ("path", "bytes_each", "counter"),
    [
        (TRAINED, 2 + 2 + 4 + 12, 4),  # a copy in each engine, gradients, main weights and moments; Adam counts steps
        (FROZEN, 2 + 2, 0),
    ],
)
def test_second_weights_are_certified(monkeypatch, path, bytes_each, counter):
    """On a GPU, which has no packed copies. A device holds more by what the second weights add."""
    monkeypatch.setitem(of_models.PARTS, "bonus", SECOND)
    before, after = (certified(graph) for graph in (ppo(), with_second(ppo(), path)))
    (more,) = (now - then for (_, then), (_, now) in zip(before.most_resident, after.most_resident, strict=True))
    assert more == bytes_each * BONUS.num_elements + counter


def certified(graph):
    plan = preset("flattening", graph, ONE, ONE.whole)
    return certify_plan(plan, graph, replace(Workload.fixed(12, 4), has_checkpoints=True), "cuda")


def test_a_checkpoints_host_copy_has_room_for_second_weights(monkeypatch):
    monkeypatch.setitem(of_models.PARTS, "bonus", SECOND)
    ((before,), (after,)) = (certified(graph).hosts for graph in (ppo(), with_second(ppo())))
    assert after.checkpoint_bytes - before.checkpoint_bytes == 12 * BONUS.num_elements


def test_the_second_weights_are_in_both_copies_of_the_actor():
    """So that the tests above test a move."""
    graph = ppo()
    plan = preset("flattening", graph, ONE, ONE.whole)
    assert {each.engine for each in instances(graph, plan) if each.role == "actor"} == {"vllm", "megatron"}
