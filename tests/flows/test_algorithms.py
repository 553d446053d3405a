"""The bodies of all algorithms as graphs: what each call reads, which weight version it waits for, how it is drawn."""

import inspect
from collections import Counter
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.forms.critic import check_critic
from prefect_rlhf.flows.forms.evaluation import EvaluationSet
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.kto import kto
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.remax import remax
from prefect_rlhf.flows.reward import reward
from prefect_rlhf.flows.safe_rlhf import safe_rlhf
from prefect_rlhf.flows.sft import sft
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import Dataset, VersionEdge
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.presets import PRESETS
from prefect_rlhf.tasks.checkpoints.run_identity import first_difference, run_identity
from prefect_rlhf.tasks.host_rewards import HostRewards, RewardFunction
from prefect_rlhf.tasks.reporting.pictures.text import graph_text
from prefect_rlhf.tasks.rl.settings.offline import DPO
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO, KLControl, ReMax
from prefect_rlhf.tasks.rl.settings.policy import Importance, KLTerm
from prefect_rlhf.tasks.settings import Optimizer
from prefect_rlhf.tasks.tracing.trace import data_name

pytestmark = pytest.mark.quick

SHAPE = TransformerShape(64, 128, 4, 4, 2, 16, 100, 64, 1e4, 1e-5, True)
SCALAR_ROLES = {"critic", "reward", "cost", "cost_critic"}
ROWS = {
    "Prompts": Dataset("", ("prompt_tokens",), 64),
    "Preferences": Dataset("", ("tokens", "prompt_length"), 64, rows_per_item=2),
    "Chats": Dataset("", ("tokens", "prompt_length", "mask"), 64),
    "RatedAnswers": Dataset("", ("tokens", "prompt_length", "mask", "label"), 64),
}
CLUSTER = ClusterShape("desk", num_nodes=1, devices_per_node=2, device_memory_bytes=64 << 30)
ALGORITHMS = {flow.algorithm.name: flow for flow in (ppo, reward, sft, dpo, kto, grpo, remax, safe_rlhf)}


class Stand:
    """An argument object with an identity."""

    head = "lm"


def traced(flow, **settings):
    """The graph of a flow, its models and datasets made up from the types of its parameters."""
    hints = get_type_hints(flow.algorithm.body)
    kinds = {name: (get_args(hint) or (hint,))[0].__name__ for name, hint in hints.items() if name != "return"}
    models = {
        role: ModelSpec(role, role, "scalar" if role in SCALAR_ROLES else "lm", SHAPE)
        for role, kind in kinds.items()
        if kind == "Model"
    }
    datasets = {}
    for name, kind in kinds.items():
        if kind in ROWS:
            datasets[name] = replace(ROWS[kind], name=name)
    models = {role: model for role, model in models.items() if role not in settings}
    for name in settings.get("evaluation", {}):
        datasets[data_name(name)] = replace(ROWS["Prompts"], name=data_name(name))
    own = (name for name in (*models, *datasets) if "." not in name)
    arguments = {name: Stand() for name in own} | settings
    if settings.get("critic", "given") is None:
        models["actor"] = replace(models["actor"], head="lm+scalar")
        arguments["actor"].head = "lm+scalar"
    return flow.algorithm.trace(arguments, models, datasets)


def calls_of(graph):
    """Role and kind of each model function call of a step without evaluation."""
    return {(call.role, call.kind) for call in graph if call.kind != "compute" and not call.every}


def test_ppo_has_the_six_calls_of_reals_figure():
    inferred = {(role, "inference") for role in ("reward", "ref", "critic")}
    trained = {("actor", "train_step"), ("critic", "train_step")}
    assert calls_of(traced(ppo)) == {("actor", "generate")} | inferred | trained


def test_ppo_without_a_critic_trains_a_shared_trunk_on_two_losses():
    """Five calls to models; values follow the actor's versions."""
    graph = traced(ppo, critic=None)
    inferred = {(role, "inference") for role in ("reward", "ref", "actor")}
    assert calls_of(graph) == {("actor", "generate"), ("actor", "train_step")} | inferred
    first, second = graph.call("actor_train").terms
    assert (first.outputs, second.outputs, second.weight) == (("logprobs",), ("values",), 0.1)
    assert first.rows == second.rows, "one forward pass"
    assert VersionEdge("actor_train", "actor_values", "actor", lag=1) in graph.version_edges()


@pytest.mark.parametrize(
    ("head", "critic", "algo", "says"),
    [
        ("lm", None, PPO(), r"critic: missing; expected a model; or set actor.head: lm\+scalar"),
        ("lm+scalar", "a critic", PPO(), r"critic: 'a critic' is not used: actor.head is lm\+scalar"),
        ("lm+scalar", None, PPO(critic_optimizer=Optimizer(lr=1.0)), "critic_optimizer: .* is not used: actor_optim"),
        ("lm", "a critic", PPO(value_weight=1.0), "algo.value_weight: 1.0 is not used"),
    ],
)
def test_a_critic_is_a_model_or_a_head_and_no_setting_is_passed_over(head, critic, algo, says):
    actor, other = Model(path="actor", head=head), critic and Model(path=critic, head="scalar")
    with pytest.raises(InvalidInput, match=says):
        check_critic(actor, other, algo)


def test_one_field_adds_the_recomputation_of_old_logprobs_and_trains_on_it():
    graph = traced(ppo, algo=PPO(old_logprobs="recompute"))
    assert graph.call("actor_inference").outputs == ("logprobs",)
    first = graph.call("actor_train").inputs[0]
    assert first.source == "actor_inference", "the first input's logprobs are those that the ratio divides by"


def test_remax_generates_twice_from_one_weight_version():
    graph = traced(remax)
    generations = [call.name for call in graph if call.kind == "generate" and not call.every]
    assert len(generations) == 2
    for name in generations:
        assert VersionEdge("actor_train", name, "actor", lag=1) in graph.version_edges()


@pytest.mark.parametrize("name", ["ppo", "grpo", "remax"])
def test_staleness_lags_the_calls_before_training_and_no_evaluation(name):
    graph = traced(ALGORITHMS[name], staleness=1)
    for edge in graph.version_edges():
        call = graph.call(edge.target)
        if call.role is not None:
            assert edge.lag == (1 if call.kind == "train_step" else 0 if call.every else 2)
    assert traced(ALGORITHMS[name]).staleness == 0


@pytest.mark.parametrize("name", ["ppo", "grpo", "remax"])
def test_with_staleness_the_ratio_is_to_the_policy_that_made_the_responses(name):
    """The first `logprobs` among a train_step's inputs are what its loss divides by: those of generation."""
    trained = traced(ALGORITHMS[name], staleness=1).call("actor_train")
    first = next(port for port in trained.inputs if "logprobs" in port.keys)
    assert first.source == "actor_generate"
    assert trained.operation.name != "policy_gradient", "which has no ratio"


def test_grpo_trains_without_a_critic_on_groups_of_responses():
    graph = traced(grpo)
    assert "critic" not in {model.role for model in graph.models}
    (generation,) = [call for call in graph if call.kind == "generate" and not call.every]
    assert generation.num_rows == generation.rows.samples * 32


@pytest.mark.parametrize("name", ["ppo", "grpo", "remax"])
def test_recomputed_logprobs_come_first_and_may_weigh_each_token(name):
    """In every algorithm that trains on its own responses."""
    settings = {"ppo": PPO, "grpo": GRPO, "remax": ReMax}[name]
    plain = traced(ALGORITHMS[name], algo=settings(old_logprobs="recompute"))
    assert plain.call("actor_train").inputs[0].source == "actor_inference"
    assert "compare_logprobs" in [call.name for call in plain]
    corrected = traced(ALGORITHMS[name], algo=settings(old_logprobs="recompute", importance=Importance()))
    assert "importance_weights" in [port.source for port in corrected.call("actor_train").inputs]
    with pytest.raises(InvalidInput, match="importance: .* is not used: .*set old_logprobs: recompute"):
        settings(importance=Importance())


@pytest.mark.parametrize("name", ["ppo", "grpo", "remax"])
def test_functions_score_in_place_of_a_model_and_hold_no_device(name):
    rewards = HostRewards(functions={"exact": RewardFunction(function="mine:exact")})
    graph = traced(ALGORITHMS[name], reward=rewards)
    assert "reward" not in {model.role for model in graph.models}
    assert graph.call("score").on_hosts and graph.call("score").outputs == ("scores",)
    nodes = augment(graph, preset("flattening", graph, CLUSTER, CLUSTER.whole), 1)
    (node,) = (node for node in nodes if node.kind == "compute" and node.call and node.call.name == "score")
    assert node.resources == ("hosts",)


@pytest.mark.parametrize(
    ("name", "settings", "roles"),
    [
        ("grpo", GRPO(kl=KLTerm(coefficient=0)), {"actor", "reward"}),
        ("remax", ReMax(kl=KLControl(kind="fixed", coefficient=0)), {"actor", "reward"}),
        ("dpo", DPO(loss="simpo"), {"actor"}),
    ],
)
def test_without_a_weight_of_kl_or_under_simpo_a_run_needs_no_reference(name, settings, roles):
    graph = traced(ALGORITHMS[name], algo=settings, ref=None)
    assert {model.role for model in graph.models} == roles
    with pytest.raises(InvalidInput, match="ref: missing; expected a model"):
        traced(ALGORITHMS[name], ref=None)
    if name == "dpo":
        with pytest.raises(InvalidInput, match="ref: .* is not used: loss simpo has no reference"):
            traced(ALGORITHMS[name], algo=settings)


@pytest.mark.parametrize(
    ("name", "settings", "reader"),
    [
        ("grpo", GRPO(kl=KLTerm(coefficient=0)), "actor_train"),
        ("remax", ReMax(kl=KLControl(kind="fixed", coefficient=0)), "kl_penalised_rewards"),
    ],
)
def test_with_kl_coefficient_0_a_reference_only_measures_the_kl(name, settings, reader):
    """The call that reports the KL reads what the reference says of each response."""
    graph = traced(ALGORITHMS[name], algo=settings)
    assert "ref_inference" in {port.source for port in graph.call(reader).inputs}


def test_kto_compares_with_answers_to_other_prompts_as_policy_and_reference_find_them():
    graph = traced(kto)
    made = graph.call("mismatched_answers")
    assert made.num_rows == 32 and graph.call("actor_mismatched").rows == made.rows == graph.call("ref_mismatched").rows
    assert {port.source for port in graph.call("actor_train").inputs} == {"answers", "ref_inference", "kto_kl"}


def test_safe_rlhf_makes_nine_calls_and_trains_the_policy_on_two_row_sets():
    graph = traced(safe_rlhf)
    calls = Counter((call.role, call.kind) for call in graph if call.kind != "compute" and not call.every)
    assert calls == Counter(
        [
            ("actor", "generate"),
            *((role, "inference") for role in ("reward", "cost", "ref", "critic", "cost_critic")),
            *((role, "train_step") for role in ("actor", "critic", "cost_critic")),
        ]
    )
    assert [term.rows.dataset for term in graph.call("actor_train").terms] == ["prompts", "pretrain"]
    assert VersionEdge("lagrange_multiplier", "lagrange_multiplier", "lagrange_multiplier", 1) in graph.version_edges()


def test_dpo_and_reward_never_part_the_answers_of_a_pair():
    for flow in (dpo, reward):
        (trained,) = [call for call in traced(flow) if call.kind == "train_step"]
        assert trained.rows_per_item == 2


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_planned_unrolled_and_drawn_by_every_preset(name):
    graph = traced(ALGORITHMS[name])
    for rule in PRESETS.keys() - {"standalone"}:  # which needs a device for each model
        # Generation, inference and training of this preset are on devices of their own.
        cluster = replace(CLUSTER, devices_per_node=4) if rule == "separation-streamed" else CLUSTER
        augmented = augment(graph, preset(rule, graph, cluster, cluster.whole), num_steps=3)
        assert {call.name for call in graph} == {node.call.name for node in augmented if node.call}
        assert "step 1" in graph_text(augmented)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_body_is_about_forty_lines(name):
    """An algorithm reads beside its paper."""
    source = inspect.getsource(ALGORITHMS[name].algorithm.body)
    assert len([line for line in source.splitlines() if line.strip()]) <= 45


PARAMETERS = {  # a deployment somewhere passes these by name: adding is fine, renaming and removing are not
    "ppo": ["prompts", "held_out", "actor", "critic", "ref", "reward", "algo", "staleness"],
    "reward": ["pairs", "held_out", "reward", "algo"],
    "run": [
        *("steps", "epochs", "plan", "seed", "checkpoint_every", "keep_checkpoints", "best_metric", "best_is"),
        *("patience", "resume_from", "output_dir", "dry_run", "steps_per_group", "call_deadline_seconds"),
        *("role_deadlines", "limits", "tracking", "replan", "replan_gain", "replan_every"),
        "expected_response_length",
    ],
}


@pytest.mark.parametrize("name", ["ppo", "reward"])
def test_names_of_deployment_parameters_are_kept(name):
    assert {*PARAMETERS[name], *PARAMETERS["run"]} <= set(ALGORITHMS[name].parameters.properties)


def test_each_deployment_parameter_has_a_description_in_the_form():
    properties = ppo.parameters.properties
    assert all(properties[name].get("description") for name in PARAMETERS["run"])


@pytest.mark.parametrize("place", ["reward", "evaluation"])
@pytest.mark.parametrize(
    "changed",
    [
        {"workers": 5},
        {"seconds_per_row": 3.0},
        {"deadline_seconds": 9.0, "start_seconds": 9.0, "retries": 4, "most_failed": 0.4},
    ],
    ids=str,
)
def test_a_run_resumes_with_other_limits_of_its_rewards(place, changed):
    """Of those in training, and of an evaluation set's own. The planner's estimates follow from some of them."""

    def identity(**limits):
        functions, own = {"exact": RewardFunction(function="a:b")}, {place: limits}
        trained, held_out = (HostRewards(functions=functions, **own.get(name, {})) for name in ("reward", "evaluation"))
        math = EvaluationSet(data={"path": "x"}, reward=held_out, max_new_tokens=8, every=3)
        return run_identity(traced(grpo, reward=trained, evaluation={"math": math}), 1, None)

    assert first_difference(identity(), identity(**changed)) is None
