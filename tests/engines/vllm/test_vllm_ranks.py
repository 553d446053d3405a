"""Several vLLM engines of different layouts on the ranks of one world, against one engine on one rank."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vllm_cases import build_command, make_folder, make_prompts, write_weights
from vllm_world import run_world

from prefect_rlhf.engines.engine import Generated, SamplingSettings
from prefect_rlhf.engines.vllm.engine import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.all]  # tests/test_plan_invariance.py has vLLM over two ranks
PROMPTS = [*make_prompts(2, 140, 160), *make_prompts(6)]
SEEDS = list(range(8))
SAMPLED = SamplingSettings(12, stop_at_eos=False)
SPLIT, REPLICAS, ALONE = (2, 0), (0, 1), (1,)  # ranks of a tp2 engine, of a dp2 pair, of the reference


@dataclass(frozen=True)
class Seen:
    """What one rank saw: each engine's answers, and what it left."""

    answers: dict[str, Generated]
    regions: dict[str, Any]
    world_sum: int
    shared_memory: list[str]


def on_rank(rank: int, first: str, second: str) -> Seen:
    """Rank 1 builds the reference alone; 2 and 0 share one engine; 0 and 1 have a replica each; then new weights."""
    answers: dict[str, Generated] = {}
    engines = _build(rank, first)
    for name in ("split", "replica", "split again"):
        _generate(engines, name, rank, answers)
    for engine in engines.values():
        write_weights(engine.weights(), second)
        engine.weights_written()
    for name in ("split written", "alone written"):
        _generate(engines, name, rank, answers)
    regions = {name: shard.region for name, shard in engines["split"].weights().items()} if "split" in engines else {}
    engines.clear()
    gc.collect()
    total = torch.tensor(rank)
    dist.all_reduce(total)
    mine = [file.name for file in Path("/dev/shm").iterdir() if "cpushm" in file.name]
    return Seen(answers, regions, int(total), mine)


def _build(rank: int, folder: str) -> dict[str, VllmEngine]:
    layouts = {"alone": (ALONE, 1, 1), "split": (SPLIT, 1, 2), "replica": (REPLICAS, 2, 1)}
    return {
        name: VllmEngine(build_command(folder, ranks=ranks, dp=dp, tp=tp, tied=False), rank)
        for name, (ranks, dp, tp) in layouts.items()
        if rank in ranks
    }


def _generate(engines: dict[str, VllmEngine], name: str, rank: int, answers: dict[str, Generated]) -> None:
    engine = engines.get(name.split()[0])
    if engine is not None:
        rows = slice(4 * rank, 4 * rank + 4) if name == "replica" else slice(None)
        answers[name] = engine.generate(PROMPTS[rows], SAMPLED, SEEDS[rows])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root: Path = tmp_path_factory.mktemp("models")
    return make_folder(root / "a", 3, tied=False), make_folder(root / "b", 4, tied=False)


@pytest.fixture(scope="module")
def seen(folders):
    return run_world(3, on_rank, *folders)


def test_tensor_parallel_tokens_match_a_single_rank(seen):
    """On ranks 2 and 0 of three, in that order; the reference is made of the data-parallel replicas on 0 and 1."""
    replicas = [row for rank in REPLICAS for row in seen[rank].answers["replica"].tokens]
    assert replicas == seen[0].answers["split"].tokens == seen[2].answers["split"].tokens


def test_tensor_parallel_logprobs_match_a_single_rank(seen):
    replicas = [x for rank in REPLICAS for row in seen[rank].answers["replica"].logprobs for x in row]
    split = [x for row in seen[0].answers["split"].logprobs for x in row]
    assert replicas == pytest.approx(split, abs=1e-4)


def test_engines_in_a_process_do_not_disturb_each_other(seen):
    """Rank 0 generates with its tp2 engine, its own replica, and its tp2 engine again."""
    assert seen[0].answers["split"] == seen[0].answers["split again"]


def test_each_rank_writes_only_its_part(seen):
    """Both halves of a tp2 engine written from whole tensors answer like a whole engine written the same way."""
    assert seen[1].answers["alone written"].tokens == seen[2].answers["split written"].tokens
    assert seen[2].answers["split"].tokens != seen[2].answers["split written"].tokens


def test_regions_of_the_ranks_tile_each_tensor(seen):
    """tp index 0 is rank 2: it holds the first half of every split tensor."""
    sizes = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
    sizes |= {"embed_tokens": 0, "lm_head": 0}
    for name, first in seen[2].regions.items():
        second, kind = seen[0].regions[name], name.split(".")[-2]
        axis = sizes.get(kind)
        if axis is None:
            assert first == second
        else:
            assert first[axis] == (0, first[axis][1])
            assert second[axis] == (first[axis][1], 2 * first[axis][1])


def test_a_collected_engine_leaves_the_world(seen):
    assert [one.world_sum for one in seen] == [3, 3, 3]


def test_no_shared_memory_has_a_name(seen):
    """So a killed rank leaves nothing behind, and two gangs never meet."""
    assert [one.shared_memory for one in seen] == [[], [], []]
