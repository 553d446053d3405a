"""Our side of the tables of docs/coming_from.md: each name is a parameter that there is."""

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.algorithm.places import ALGORITHMS
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.forms.foreign_options import OURS, REFUSED, answer
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.rl.settings.offline import DPO
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO
from prefect_rlhf.tasks.trackers.tracking import Tracking

GROUPS = {
    "algo": (GRPO, PPO, DPO),
    "prompts": (Prompts,),
    "held_out": (Prompts,),
    "actor": (Model,),
    "tracking": (Tracking,),
    "reward": (HostRewards,),
    "play": (Play,),
}
NO_PARAMETERS = {"micro_batches=4", "recompute=all", "engine=vllm", "tp2", "actor_train.learning_rate", "metrics.jsonl"}
"""Words of plans, and what a run writes."""
LINES = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text().splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("| ")]
ROWS = [row for row in CELLS if len(row) == 5 and row[4] != "ours"]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[4])} - NO_PARAMETERS)


def has(kind, path):
    """Whether a group of settings has the field at a dotted path, through groups that may be left out."""
    name, _, rest = path.partition(".")
    field = kind.model_fields.get(name)
    if field is None or not rest:
        return field is not None
    kinds = [one for one in (field.annotation, *get_args(field.annotation)) if isinstance(one, type)]
    return any(has(one, rest) for one in kinds if issubclass(one, BaseModel))


def test_there_are_names_to_look_at():
    assert len(ROWS) > 50 and len(NAMES) > 50


@pytest.mark.parametrize("name", NAMES)
def test_each_name_of_ours_is_a_parameter(name):
    group, _, path = name.partition(".")
    if group in GROUPS:
        assert any(has(kind, path) for kind in GROUPS[group])
    else:
        of_flows = {key for algorithm in ALGORITHMS for key in find_flow(algorithm).parameters.properties}
        assert name in RunOptions.model_fields or name in of_flows


def test_where_ppo_has_another_name_than_grpo_each_has_its_own():
    pairs = [row for row in CELLS if len(row) == 2 and row[0].startswith("`algo.")]
    assert len(pairs) >= 3
    for grpos, ppos in pairs:
        for kind, other, cell in ((GRPO, PPO, grpos), (PPO, GRPO, ppos)):
            names = [name.removeprefix("algo.") for name in re.findall(r"`([^`]+)`", cell)]
            assert all(has(kind, name) and not has(other, name) for name in names), cell


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_option_of_the_page_is_answered_with_the_names_beside_it(row):
    written = {"actor_train.learning_rate", "metrics.jsonl"}
    ours = set(re.findall(r"`([^`]+)`", row[4])) - written
    for cell in row[1:4] if ours else []:
        for option in re.findall(r"`([^`]+)`", cell):
            refused = any(option in names for names in REFUSED.values())
            assert refused or all(name in answer(f"--{option.lstrip('.')}") for name in ours), option


def test_each_option_that_is_answered_is_on_the_page():
    there = set(re.findall(r"`\.?([^`]+)`", "\n".join(LINES)))
    assert {name for names in (*OURS.values(), *REFUSED.values()) for name in names} <= there


def test_adapters_are_refused_by_all_their_names():
    assert {answer(name) for name in ("lora_rank", "--lora_r", "use_peft")} == {
        "adapters are not supported yet; all weights are trained"
    }
