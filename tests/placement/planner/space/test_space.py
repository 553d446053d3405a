"""The space that is searched is the space that may run: no plan that a file can say, and that fits, beats the bound.

Plans are drawn field by field from `Placement`, written as a file, then read, checked, timed and certified as in a run.
"""

import random
import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from math import log2
from pathlib import Path

import pytest

from benchmarks.planner.read_flags import read_flags
from benchmarks.planner.referee import QUESTIONS
from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands import plan as plan_command
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.placement.cost.paged_cache import gib_above, whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.devices.strategy import Strategy, strategies
from prefect_rlhf.placement.engine_traits import engines_of
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.memory.savings import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, Placement, instances
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.mesh_space import meshes_of
from prefect_rlhf.placement.plans.check import check_plan, violations
from prefect_rlhf.placement.plans.plan_file import plan_yaml, read_plan
from prefect_rlhf.placement.rows.shares import num_groups
from prefect_rlhf.placement.words.rows_first import sends_rows
from tests.support.cases import first
from tests.support.strategies import divisors

LINES = QUESTIONS.read_text().splitlines()
FEW = (
    "dpo --model actor=llama-7b",
    "grpo --model actor=llama-7b --model reward=llama-7b --cluster 1x8:h100",
    "remax --model actor=llama-7b --model reward=llama-7b --cluster 1x8:h100",
)
MIXTURES = (
    "grpo --model actor=qwen3-30b-a3b --cluster 2x8:h200 --prompt-length 512 --response-length 512 --batch-size 16",
    "dpo --model actor=mixtral-8x7b --cluster 1x8:mi300x --prompt-length 512 --response-length 512 --batch-size 64",
)
PLANS_EACH = 60  # of each question: 2,100 plans in all
TRIES = 50  # to find a legal placement of a call, or a legal plan


def drawn_strategy(draw: random.Random, call: Call, placed: Placement, question: Question) -> Strategy:
    """Any for so many devices, of a mixture of experts with any degree that divides dp."""
    strategy = draw.choice(tuple(strategies(placed.mesh.num_devices)))
    has_experts = question.graph.model(call.role or "").shape.experts is not None
    degrees = [ep for ep in range(1, strategy.dp + 1) if strategy.dp % ep == 0]
    return replace(strategy, ep=draw.choice(degrees)) if has_experts else strategy


def drawn_order(draw: random.Random, call: Call, placed: Placement, question: Question) -> tuple[int, ...]:
    """Mostly the mesh's own, else any."""
    positions = range(placed.mesh.num_devices)
    return tuple(draw.sample(positions, len(positions))) if draw.random() < 0.2 else ()


def drawn_micro_batches(draw: random.Random, call: Call, placed: Placement, question: Question) -> int:
    """Any number that a replica has items for, small ones as often as large ones; vLLM has none."""
    if placed.engine == "vllm":
        return 1
    return round(2 ** draw.uniform(0, log2(max(1, call.most_items(placed.strategy.dp)))))


def drawn_cache(draw: random.Random, call: Call, placed: Placement, question: Question) -> float | None:
    """vLLM's for all rows or for any number of them, small ones as often as large ones."""
    if placed.engine != "vllm" or draw.random() < 0.3:
        return None
    rows = round(2 ** draw.uniform(0, log2(max(1, call.most_items(placed.strategy.dp)))))
    sizes = ModelSizes.of(question.graph.model(call.role or ""))
    return gib_above(whole_cache_bytes(rows, question.workload.longest, sizes, placed.strategy.tp))


def drawn_recomputation(draw: random.Random, call: Call, placed: Placement, question: Question) -> int | str:
    """None or all as often as any number of layers of a stage; only a train_step has a backward."""
    if call.kind != "train_step":
        return 0
    layers = ModelSizes.of(question.graph.model(call.role or "")).stage_layers(placed.strategy.pp)
    return draw.choice((0, "all", draw.randint(0, layers)))


def drawn_parts(draw: random.Random, call: Call, placed: Placement, question: Question) -> int:
    """None as often as 2, 4 or any number that divides the groups."""
    if call.kind == "train_step" or call.rows.choices:
        return 1
    return draw.choice((1, 2, 4, draw.choice(divisors(num_groups(question.graph, call)))))


DRAWN: Mapping[str, Callable[[random.Random, Call, Placement, Question], object]] = {
    "mesh": lambda draw, call, placed, asked: draw.choice(tuple(meshes_of(asked.site.cluster, asked.site.mesh))),
    "strategy": drawn_strategy,
    "engine": lambda draw, call, placed, asked: draw.choice(engines_of(call.kind)),
    "micro_batches": drawn_micro_batches,
    "offload": lambda draw, call, placed, asked: draw.choice(("none", "all", "optimizer")),
    "prefetch": lambda draw, call, placed, asked: draw.random() < 0.5,
    "device_order": drawn_order,
    "cache_gib": drawn_cache,
    "recompute": drawn_recomputation,
    "sequence_parallel": lambda draw, call, placed, asked: (
        call.kind == "train_step" and placed.strategy.tp > 1 and draw.random() < 0.5
    ),
    "parts": drawn_parts,
    "rows_first": lambda draw, call, placed, asked: sends_rows(call, asked.graph) and draw.random() < 0.5,
    "registered": lambda draw, call, placed, asked: (),  # no word of another package is registered here
}
"""How each field of a placement is drawn, of a call whose earlier fields are drawn already."""


def drawn_placement(draw: random.Random, call: Call, question: Question) -> Placement:
    for _ in range(TRIES * TRIES):
        placed = Placement(question.site.mesh, next(iter(strategies(question.site.mesh.num_devices))), "megatron")
        for name in DRAWN:
            placed = replace(placed, **{name: DRAWN[name](draw, call, placed, question)})
        if not any(violations(call, placed, question.graph, question.site.backend)):
            return placed
    raise AssertionError(f"no legal placement of {call.name} in {TRIES * TRIES} tries")


def drawn_plan(draw: random.Random, question: Question, known: ExecutionPlan, path: Path) -> ExecutionPlan:
    """A legal plan, read from a file: one to three calls of the known one placed anew, or in one of four plans all."""
    for _ in range(TRIES):
        calls = [call for call in question.graph if call.kind != "compute"]
        anew = calls if draw.random() < 0.25 else draw.sample(calls, min(len(calls), draw.randint(1, 3)))
        placements = dict(known.placements) | {call.name: drawn_placement(draw, call, question) for call in anew}
        plan = replace(known, placements=tuple(placements.items()))
        for users in instances(question.graph, plan).values():  # what they share is the same for all
            first = plan[users[0].name]
            alike = {field: getattr(first, field) for field in ("offload", "prefetch", "device_order", "cache_gib")}
            placements |= {user.name: replace(placements[user.name], **alike) for user in users}
        path.write_text(plan_yaml(replace(plan, placements=tuple(placements.items()))))
        try:
            return check_plan(read_plan(path, question.site.cluster), question.graph, question.site.mesh)
        except RlhfError:
            continue
    raise AssertionError(f"no legal plan in {TRIES} tries")


def assert_none_is_below(line: str, count: int, path: Path) -> None:
    options = plan_command.read_options(read_flags(plan_command.plan, shlex.split(line, comments=True)))
    question = read_question(find_flow(options.algorithm), options)
    planned, draw = plan_graph(question, budget_seconds=1.0), random.Random(line)
    for _ in range(count):
        plan = drawn_plan(draw, question, planned.plan, path)
        is_above = question.seconds(plan) >= planned.lower_bound_seconds * (1 - 1e-9)
        whole = with_changes(plan, question.graph.calls, parts=1)  # the bound is for calls that fit whole
        assert is_above or not question.fits(whole), f"{question.seconds(plan)} s:\n{plan_yaml(plan)}"


def test_every_field_of_a_placement_is_drawn():
    for field in fields(Placement):
        assert field.name in DRAWN, (
            f"Placement.{field.name} is never drawn: say in DRAWN how, so that the bound is held"
        )
    assert [degree.name for degree in fields(Strategy)] == ["dp", "tp", "pp", "ep"], "drawn_strategy draws these"


@pytest.mark.parametrize(
    "line", first(1, [*(line for line in LINES if line.startswith(FEW) and "staleness" not in line), *MIXTURES])
)
def test_no_plan_file_beats_the_bound(line, tmp_path):
    assert_none_is_below(line, 20, tmp_path / "plan.yaml")


@pytest.mark.all
@pytest.mark.parametrize("line", [*LINES, *MIXTURES])
def test_no_plan_file_beats_the_bound_of_any_question(line, tmp_path):
    assert_none_is_below(line, PLANS_EACH, tmp_path / "plan.yaml")
