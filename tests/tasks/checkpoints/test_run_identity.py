"""The identity of a run across versions: what came later is as it is by default, and nothing else is."""

from dataclasses import replace
from functools import reduce

import pytest

from prefect_rlhf.placement.models.model import OptimizerSpec
from prefect_rlhf.placement.row_set import RowLimit
from prefect_rlhf.tasks.checkpoints.run_identity import first_difference, run_identity, with_defaults
from prefect_rlhf.tasks.host_rewards import HostRewards, RewardFunction
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.rl.losses import ppo_clip
from prefect_rlhf.tasks.rl.settings.online import PPO
from prefect_rlhf.tasks.tracing.operations import operation
from tests.support.strategies import ppo
from tests.tasks import row_world

pytestmark = pytest.mark.quick


def graph(algo=None, **optimizer):
    """PPO whose actor is trained with the real loss, its settings and optimizer as given."""
    made = row_world.with_operations(ppo())
    bound = ppo_clip(algo or PPO())
    calls = (
        replace(call, terms=(replace(call.terms[0], operation=bound.operation),))
        if call.name == "actor_train_step"
        else call
        for call in made
    )
    models = (replace(model, optimizer=OptimizerSpec(**optimizer)) for model in made.models)
    return replace(made, calls=tuple(calls), models=tuple(models))


def written_without(identity, path):
    """The identity as a version wrote it that did not know the field at a dotted path."""
    *places, field = path.split(".")
    del reduce(lambda place, name: place[int(name) if name.isdigit() else name], places, identity)[field]
    return identity


@pytest.mark.parametrize(
    "path",
    [
        "models.actor.shape.biases",
        "models.actor.shape.not_run",
        "models.actor.optimizer.betas",
        "models.actor.optimizer.schedule",
        "datasets.prompts.columns",
        "calls.actor_train_step.temperature",
        "calls.actor_train_step.inputs.0.rows_each",
        "calls.actor_train_step.terms.check_policy_columns.operation.settings.old_logprobs",
        "calls.actor_train_step.terms.check_policy_columns.operation.settings.update",
        "calls.actor_train_step.terms.check_policy_columns.operation.settings.actor_optimizer.warmup_steps",
    ],
)
def test_a_new_field_at_its_default_changes_no_identity(path):
    """Of shapes, datasets, calls and settings, at any depth."""
    now = graph()
    saved = written_without(run_identity(now, 1, None), path)
    assert first_difference(with_defaults(saved, now), run_identity(now, 1, None)) is None


def scored(function=None, **settings):
    """The graph with rewards by a function."""
    rewards = HostRewards(functions={"exact": RewardFunction(function="mine:exact", **(function or {}))}, **settings)
    calls = (
        replace(call, operation=operation("score", rewards)) if call.name == "advantages" else call for call in graph()
    )
    return replace(graph(), calls=tuple(calls))


@pytest.mark.parametrize(
    "changed",
    [
        {"function": {"try_first": False}},
        {"workers": 3, "seconds_per_row": 2.0},
        {"deadline_seconds": 9.0, "start_seconds": 99.0, "retries": 3, "most_failed": 0.5},
    ],
)
def test_the_trial_the_processes_and_the_limits_of_rewards_are_not_part_of_the_identity(changed):
    """If a slow judge ended a run, it can resume with other limits, even if an earlier version saved it."""
    saved, now = run_identity(scored(), 1, None), scored(**changed)
    assert saved == run_identity(now, 1, None) == with_defaults(saved, now)


@pytest.mark.parametrize(
    ("changed", "place"),
    [({"function": {"weight": 2.0}}, "functions.exact.weight"), ({"failed_value": 0.0}, "failed_value")],
)
def test_what_decides_a_score_is_part_of_the_identity(changed, place):
    found = first_difference(run_identity(scored(), 1, None), run_identity(scored(**changed), 1, None))
    assert found[0].endswith(f"operation.settings.{place}")


@pytest.mark.parametrize(
    ("path", "now"),
    [
        ("models.actor.optimizer", graph()),
        ("models.actor.optimizer.warmup_steps", graph(warmup_steps=3)),
        (
            "calls.actor_train_step.terms.check_policy_columns.operation.settings.old_logprobs",
            graph(PPO(old_logprobs="recompute")),
        ),
    ],
)
def test_a_new_field_that_is_used_is_named_as_a_difference(path, now):
    saved = written_without(run_identity(now, 1, None), path)
    assert first_difference(with_defaults(saved, now), run_identity(now, 1, None))[0] == path


@pytest.mark.parametrize(
    "path",
    [
        "models.actor.shape.head",
        "calls.gone",
        "calls.actor_train_step.terms.check_policy_columns.operation.settings.gone",
    ],
)
def test_a_removed_field_counts_as_a_difference(path):
    now = graph()
    saved = run_identity(now, 1, None)
    *places, field = path.split(".")
    reduce(dict.__getitem__, places, saved)[field] = 7
    assert first_difference(with_defaults(saved, now), run_identity(now, 1, None)) == (path, 7, None)


def test_a_longer_limit_for_computed_rows_keeps_the_runs_identity():
    """A run that ended because a row was too long goes on with a larger one."""
    before, after = (
        replace(graph(), calls=tuple(replace(call, row_limit=RowLimit(longest=most)) for call in graph()))
        for most in (8, 9)
    )
    assert run_identity(before, 1, None) == run_identity(after, 1, None)


def playing(env=None, cwd=None, args=("--key", "sekrit"), url=None, **changed):
    """The graph with rows that a model plays with an MCP server."""
    server = {"command": "serve", "args": list(args), "env": env or {"TOKEN": "sekrit"}}
    server |= {} if cwd is None else {"cwd": cwd}
    arguments = {"servers": {"notes": server if url is None else {"url": url}}}
    fields = {"function": "mine:right", "signature": "mcp", "max_tokens": 8, "arguments": arguments} | changed
    bounds = Play(**fields).absolute().bounds
    played = {"play": bounds, "max_new_tokens": bounds.max_tokens}
    calls = (replace(call, **played) if call.name == "actor_generate" else call for call in graph())
    return replace(graph(), calls=tuple(calls))


@pytest.mark.parametrize(
    "changed",
    [
        {"cwd": "elsewhere"},
        {"workers": 3, "at_once": 5, "python": "/other/python"},
        {"expected_turns": 2.0, "expected_answer_tokens": 7.0, "seconds_per_answer": 3.0},
        {"deadline_seconds": 9.0, "play_seconds": 99.0, "start_seconds": 99.0, "retries": 3, "most_failed": 0.5},
    ],
)
def test_a_plays_processes_expectations_and_limits_are_not_part_of_the_identity(changed):
    assert run_identity(playing(**changed), 1, None) == run_identity(playing(), 1, None)


def test_a_play_may_resume_from_another_folder(tmp_path, monkeypatch):
    before = run_identity(playing(), 1, None)
    monkeypatch.chdir(tmp_path)
    assert run_identity(playing(), 1, None) == before


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"max_turns": 3}, "max_turns"),
        ({"overlong_answers": "end"}, "overlong_answers"),
        ({"failed_value": 0.0}, "failed_value"),
        ({"function": "mine:wrong"}, "function"),
        ({"env": {"TOKEN": "hidden"}}, "arguments.servers.notes.env.TOKEN"),
        ({"env": {"OTHER": "sekrit"}}, "arguments.servers.notes.env.TOKEN"),
        ({"env": "hidden"}, "arguments.servers.notes.env"),
        ({"args": ["--key", "hidden"]}, "arguments.servers.notes.args"),
    ],
)
def test_a_plays_changed_setting_is_named_without_variables_values(changed, place):
    saved, now = run_identity(playing(), 1, None), playing(**changed)
    difference = first_difference(with_defaults(saved, now), run_identity(now, 1, None))
    assert difference[0] == f"calls.actor_generate.play.settings.{place}"
    assert "sekrit" not in f"{saved}{difference}" and "hidden" not in str(difference)


@pytest.mark.parametrize(
    ("changed", "other", "place"),
    [
        ({"url": "https://notes.example/?key=sekrit"}, {"url": "https://notes.example/"}, "servers.notes.url"),
        (
            {"signature": "openenv", "arguments": {"base_url": "https://sekrit@game.example"}},
            {"signature": "openenv", "arguments": {"base_url": "https://game.example"}},
            "base_url",
        ),
        (
            {"signature": "environment", "arguments": {"key": "sekrit", "level": 3}},
            {"signature": "environment", "arguments": {"key": "hidden", "level": 3}},
            "key",
        ),
    ],
)
def test_a_plays_addresses_and_arguments_are_compared_without_showing_them(changed, other, place):
    saved, now = run_identity(playing(**changed), 1, None), playing(**other)
    difference = first_difference(with_defaults(saved, now), run_identity(now, 1, None))
    assert difference[0] == f"calls.actor_generate.play.settings.arguments.{place}"
    assert "sekrit" not in f"{saved}" and "example" not in f"{saved}{difference}" and "hidden" not in f"{difference}"


def test_a_plays_new_setting_at_its_default_changes_no_identity():
    """Nor does filling it in show a server's variables."""
    now = playing()
    saved = written_without(run_identity(now, 1, None), "calls.actor_generate.play.settings.together")
    assert first_difference(with_defaults(saved, now), run_identity(now, 1, None)) is None
    assert "sekrit" not in str(with_defaults(saved, graph()))


def test_an_earlier_versions_estimate_of_a_reward_makes_no_difference():
    now = graph()
    saved = run_identity(now, 1, None)
    saved["calls"]["advantages"]["host_seconds"] = 0.128
    assert first_difference(with_defaults(saved, now), run_identity(now, 1, None)) is None
