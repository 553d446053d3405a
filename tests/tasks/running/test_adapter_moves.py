"""Of a model with an adapter only the adapter is versioned, moved and stored; engines compute nothing here."""

from dataclasses import replace

import pytest

from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.weights import parts
from prefect_rlhf.tasks.checkpoints.folders import folder_of, read_checkpoint
from tests.tasks.running import test_second_weights as world

ADAPTER = AdapterSpec(4, 8.0, ("q_proj", "k_proj", "down_proj"))


@pytest.fixture
def made(tmp_path, monkeypatch):
    def with_adapter(graph, path):
        of_actor = replace(graph.model("actor"), adapter=ADAPTER)
        return replace(graph, models=tuple(of_actor if each.role == "actor" else each for each in graph.models))

    monkeypatch.setattr(world, "with_second", with_adapter)
    run = world.Made(tmp_path / "run").build()
    yield run
    run.gang.close()


def values(made, engine, is_adapter):
    (instance,) = (each for each in made.rank.models if (each.role, each.engine) == ("actor", engine))
    shards = made.rank.models[instance].engine.shards
    return {
        float(value)
        for name, shard in shards.items()
        if ("lora" in name) == is_adapter
        for value in shard.view.unique()
    }


def test_a_reallocation_moves_only_the_adapter(made):
    made.step(1)
    made.step(2)
    assert values(made, "megatron", True) == {2} and values(made, "vllm", True) == {1}
    assert values(made, "megatron", False) == values(made, "vllm", False) == {0}
    assert made.versions("actor.adapter") == [1, 2]
    assert made.versions("actor.trunk") == [0]


def test_a_checkpoint_has_the_adapter_and_no_frozen_weights(made, tmp_path):
    made.step(1)
    folder = folder_of(made.run.run_dir, 1)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.manifest.shards.keys() == {"actor.adapter", "critic.trunk", "critic.scalar_head"}
    names = {parameter.name for parameter in parts(made.run.graph.model("actor"))["adapter"]}
    assert checkpoint.manifest.fingerprints["actor.adapter"].keys() == names
    resumed = world.Made(tmp_path / "later", checkpoint=checkpoint).build()
    assert values(resumed, "megatron", True) == {1} and values(resumed, "megatron", False) == {0}
    resumed.step(2)
    assert values(resumed, "vllm", True) == {1}
    resumed.gang.close()
