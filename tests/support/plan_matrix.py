"""The plans under which runs must give one result, and those runs: real Prefect, gang and engines, tiny models.

PPO's critic is deeper and narrower than the actor, and its layers do not divide by 4, so pipelines are uneven. float32
and Adam with eps 1e-3: with 1e-8 an element whose gradient is nearly 0 takes a whole step in a direction that rounding
decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prefect.states import State

from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.ppo import ppo
from tests.support.authors import keeps_best, keeps_pairs, with_pretraining
from tests.support.runs import COMPUTATIONS, Compact, Result, end, leased, num_devices, plan_file
from tests.support.tiny import make_model, make_pairs, make_prompts
from tests.tasks.small_tokenizer import save_letter_tokenizer

PLAYS = Path(__file__).parents[1] / "flows" / "plays.py"
ROWS, MINI_BATCHES, STEPS = 16, 2, 2
OPTIMIZER = {"lr": 2e-3, "eps": 1e-3}
SEED = 2  # seed 1 draws tokens so unlikely that the first gradient has a norm of 80, which rounds beyond 1e-5
COMPUTATIONS_OF_GRPO = ("informative", "grpo_advantages", "record_rollouts", "record_evaluation")


def plan(generate: str, reward: str, ref: str, values: str, actor: str, critic: str) -> Compact:
    """Where the model function calls of PPO go; inference and training run on Megatron, evaluation like training."""
    return {
        "actor_generate": generate,
        "reward_inference": f"{reward} engine=megatron",
        "ref_inference": f"{ref} engine=megatron",
        "critic_inference": f"{values} engine=megatron",
        "actor_train": f"{actor} engine=megatron",
        "critic_train": f"{critic} engine=megatron",
        "actor_evaluation": generate,
        "reward_evaluation": f"{reward} engine=megatron",
    }


def grpo_plan(generate: str, reward: str, ref: str, actor: str) -> Compact:
    """The same for GRPO, which has no critic."""
    of_ppo = plan(generate, reward, ref, "0", actor, "0")
    return {call: words for call, words in of_ppo.items() if not call.startswith("critic")}


ONE = plan("0 engine=vllm", "0", "0", "0", "0", "0")
"""Everything on one device: what all others are compared with."""

TAKING_TURNS = plan(
    "0 engine=vllm offload=all",
    "0 offload=all prefetch=false",
    "0 offload=all",
    "0 offload=optimizer",
    "0 offload=all",
    "0 offload=optimizer",
)
"""The same, with all models in host memory between their uses, the critic's weights apart."""

FOUR_RANKS: Mapping[str, Compact] = MappingProxyType(
    {
        "dp4": plan("0-3 dp4 engine=vllm", "0-3 dp4", "0-3 dp4", "0-3 dp4", "0-3 dp4", "0-3 dp4"),
        "tp4": plan(
            "0-3 tp4 engine=vllm",
            "0-3 dp2 tp2",
            "0-3 tp4",
            "0-3 tp2 dp2",
            "0-3 tp4 sequence_parallel=true",
            "0-3 dp2 tp2",
        ),
        "pp4": plan(
            "0-3 dp4 engine=vllm", "0-3 pp4", "0-3 pp4", "0-3 pp4", "0-3 pp4", "0-3 pp4 micro_batches=2 recompute=1"
        ),
        "dp2 tp2, micro-batches": plan(
            "0-3 dp2 tp2 engine=vllm cache_gib=0.0002",
            "0-3 dp4",
            "0-3 dp2 tp2 micro_batches=2",
            "0-3 dp2 pp2 micro_batches=4",
            "0-3 dp2 tp2 micro_batches=4 recompute=1",
            "0-3 dp2 tp2 micro_batches=2 recompute=all",
        ),
        "dp2 pp2": plan(
            "0-3 dp4 engine=vllm",
            "0-3 dp2 pp2",
            "0-3 dp2 pp2",
            "0-3 dp2 pp2",
            "0-3 dp2 pp2 micro_batches=4",
            "0-3 dp2 pp2 micro_batches=4",
        ),
        "tp2 pp2": plan(
            "0-3 tp4 engine=vllm",
            "0-3 tp2 pp2",
            "0-3 tp2 pp2",
            "0-3 dp4",
            "0-3 tp2 pp2 sequence_parallel=true",
            "0-3 pp2 tp2",
        ),
        "split": plan("0-3 dp4 engine=vllm", "2-3 dp2", "0-1 dp2", "2-3 dp2", "0-1 dp2", "2-3 dp2 micro_batches=2"),
        "disjoint": plan("0 engine=vllm", "1", "1", "3", "2", "3 micro_batches=4"),
        "offload": plan(
            "0-1 tp2 engine=vllm offload=all",
            "0-1 dp2 offload=all",
            "0-1 pp2 offload=all",
            "2-3 tp2 offload=optimizer",
            "0-1 dp2 offload=optimizer",
            "2-3 tp2 offload=optimizer",
        ),
        "all of it offloaded": plan(
            "0-3 dp2 tp2 engine=vllm offload=all",
            "0-3 dp4 offload=all prefetch=false",
            "0-3 dp4 offload=all prefetch=false",
            "0-3 dp4 offload=all",
            "0-3 dp2 pp2 offload=all",
            "0-3 dp4 offload=all",
        ),
        "each call its own": plan(
            "0-3 dp2 tp2 engine=vllm",
            "3",
            "0-1 pp2 micro_batches=2",
            "2 micro_batches=2",
            "0-1 tp2 micro_batches=2",
            "2-3 pp2 micro_batches=4",
        ),
        "one copy generates and trains": plan(
            "0-3 dp2 tp2 engine=megatron", "2-3 dp2", "0-1 dp2", "0-3 dp4", "0-3 dp2 tp2", "0-3 dp4"
        ),
        "pipeline generates": plan(
            "0-3 tp2 pp2 engine=megatron",
            "2-3 dp2 rows_first=true",
            "0-1 tp2",
            "0-3 dp4",
            "0-3 dp2 tp2 recompute=all sequence_parallel=true",
            "2-3 pp2 recompute=2",
        ),
        "streamed": plan("0-1 dp2 engine=vllm parts=4", "2 parts=4", "3 parts=2", "2 parts=8", "0-3 dp4", "2-3 dp2"),
        "streamed pipelines": plan(
            "0-1 pp2 engine=megatron parts=2",
            "2-3 dp2 parts=4 offload=all",
            "2-3 pp2 parts=4 micro_batches=2",
            "2 parts=8",
            "0-3 dp2 tp2 micro_batches=2",
            "2-3 pp2",
        ),
    }
)

ALONE = plan("0 engine=megatron", "0", "0", "0", "0", "0")
TWO_RANKS = plan("0-1 dp2 engine=megatron", "0-1 dp2", "0-1 dp2", "0-1 pp2", "0-1 dp2", "0-1 dp2")
"""The same on one device and in two replicas, for batches that do not divide by two."""

SPLIT_ACTOR = plan("0-1 tp2 engine=vllm", "0-1 dp2", "0-1 pp2", "0-1 dp2", "0-1 tp2", "0-1 dp2")
"""The actor split over two ranks wherever it generates and trains."""

REAL_EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "real_1x8.yaml"
"""ReaL's implementation notes: the (1, 8) mesh, each call with a mesh and strategy of its own."""


def parameters(folder: Path, family: str = "llama", kv_heads: int | None = None) -> dict[str, Any]:
    """A PPO run's parameters; models and prompts are written into `folder`. The actor is of a family."""
    actor = make_model(folder / "actor", layers=4, hidden=128, heads=4, family=family, kv_heads=kv_heads)
    critic = make_model(folder / "critic", scalar=True, layers=6, hidden=64, heads=4)
    reward = make_model(folder / "reward", scalar=True, layers=5, hidden=128, heads=4)
    if family == "qwen2":  # whose tokenizer is another; all roles read the actor's tokens
        save_letter_tokenizer(folder / "critic")
        save_letter_tokenizer(folder / "reward")
    prompts = make_prompts(folder / "prompts.parquet", num_train=2 * ROWS, num_held_out=ROWS)
    exact = {"dtype": "float32"}
    return {
        "prompts": {"path": prompts},
        "held_out": {"path": prompts, "split": "held_out"},
        "actor": {"path": actor, **exact},
        "ref": {"path": actor, **exact},
        "critic": {"path": critic, "head": "scalar", **exact},
        "reward": {"path": reward, "head": "scalar", **exact},
        "algo": {
            "batch_size": ROWS,
            "sampling": {"max_new_tokens": 8},
            "evaluate_every": 2,
            "update": {"epochs": 1, "mini_batches": MINI_BATCHES},
            "actor_optimizer": OPTIMIZER,
            "critic_optimizer": OPTIMIZER,
        },
        "output_dir": str(folder / "runs"),
        "seed": SEED,
        "steps": STEPS,
    }


def grpo_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of GRPO with the models and prompts of that run of PPO; of six groups four are trained on."""
    algo = {name: given["algo"][name] for name in ("sampling", "evaluate_every", "update")}
    groups = {"batch_size": 4, "samples_per_prompt": 4, "over_sampling": 1.5, "optimizer": OPTIMIZER}
    kept = {name: value for name, value in given.items() if name != "critic"}
    return kept | {"algo": algo | groups | {"kl": {"coefficient": 0.1}}}


def start(
    flow: AlgorithmFlow,
    given: Mapping[str, Any],
    plan: Compact | Path,
    name: str,
    computations: Sequence[str],
    count: int,
    nodes: int = 1,
    kinds: Sequence[Mapping[str, Any]] = (),
) -> State:
    """Run a flow under a plan with `count` ranks, on `nodes` together, which may be of `kinds`; return its final state.

    A Prefect server must be there; Ray for nodes.
    """
    file = Path(given["output_dir"]).parent / f"{name.replace(' ', '_').replace(',', '')}.json"
    per_node = count // nodes if nodes > 1 else 8
    path = plan if isinstance(plan, Path) else plan_file(plan, file, computations, per_node)
    with leased(count, nodes, kinds):
        return end(flow, {**given, "plan": str(path)})


def run(given: Mapping[str, Any], plan: Compact | Path, name: str, num_devices: int = 4, **nodes: Any) -> Result:
    """Run PPO under a plan, or GRPO without a critic; `nodes` as in `start`."""
    flow, computations = (ppo, COMPUTATIONS) if "critic" in given else (grpo, COMPUTATIONS_OF_GRPO)
    return Result.of(start(flow, given, plan, name, computations, num_devices, **nodes))


@dataclass(frozen=True, slots=True)
class Case:
    """A run that has one result under all `plans`, of which the first is for one device."""

    flow: AlgorithmFlow
    parameters: Callable[[Path], dict[str, Any]]
    plans: Mapping[str, Compact]
    computations: Sequence[str] = COMPUTATIONS

    def end(self, given: Mapping[str, Any], name: str) -> State:
        """Run it under a plan, on as many devices as the plan uses; return its final state."""
        plan = self.plans[name]
        return start(self.flow, given, plan, name, self.computations, num_devices(plan))

    def run(self, given: Mapping[str, Any], name: str) -> Result:
        """Run it under a plan to its end."""
        return Result.of(self.end(given, name))


def made_once(
    cases: Mapping[str, Case], make_folder: Callable[[], Path]
) -> tuple[Callable[[str], dict[str, Any]], Callable[..., Result]]:
    """Return functions for a case's parameters and its run under a plan, by default `alone`; each is made once."""

    @cache
    def parameters(case: str) -> dict[str, Any]:
        return cases[case].parameters(make_folder())

    @cache
    def run(case: str, plan: str = "alone") -> Result:
        return cases[case].run(parameters(case), plan)

    return parameters, run


def shared_trunk(folder: Path) -> dict[str, Any]:
    """The parameters of PPO without a critic: the actor has both heads."""
    given = parameters(folder)
    algo = {key: value for key, value in given["algo"].items() if key != "critic_optimizer"}
    algo |= {"value_weight": 0.5, "actor_optimizer": {"lr": 2e-3, "eps": 1e-3, "head_lr": 1e-2}}
    actor = given["actor"] | {"head": "lm+scalar", "new_head": True}
    kept = {name: value for name, value in given.items() if name != "critic"}
    return kept | {"actor": actor, "algo": algo, "checkpoint_every": 1}


TRUNK_CALLS = (
    "actor_generate",
    "actor_evaluation",
    "reward_inference",
    "ref_inference",
    "actor_values",
    "actor_train",
    "reward_evaluation",
)
TRUNK_PLANS = {
    "alone": dict.fromkeys(TRUNK_CALLS, "0 engine=megatron"),
    "pipeline, values from a copy": {
        **dict.fromkeys(TRUNK_CALLS[:2], "0-1 tp2 engine=vllm"),
        "reward_inference": "0 engine=megatron",
        "ref_inference": "1 engine=megatron",
        "actor_values": "0-1 dp2 engine=megatron",
        "actor_train": "0-1 pp2 engine=megatron micro_batches=2",
        "reward_evaluation": "0 engine=megatron",
    },
    "one copy in replicas": dict.fromkeys(TRUNK_CALLS, "0-1 dp2 engine=megatron"),
    "shards, and generation in a pipeline": {
        **dict.fromkeys(TRUNK_CALLS, "0-1 tp2 engine=megatron offload=all"),
        **dict.fromkeys(TRUNK_CALLS[:2], "0-1 pp2 engine=megatron"),
    },
}


def two_row_sets(folder: Path) -> dict[str, Any]:
    """The parameters of a flow whose train_step takes two row sets."""
    actor = make_model(folder / "actor", layers=4, hidden=128, heads=4)
    reward = make_model(folder / "reward", scalar=True, layers=5, hidden=128, heads=4)
    return {
        "prompts": {"path": make_prompts(folder / "prompts.parquet", num_train=8)},
        "pretrain": {"path": make_pairs(folder / "pairs.parquet")},
        "actor": {"path": actor, "dtype": "float32"},
        "reward": {"path": reward, "head": "scalar", "dtype": "float32"},
        "algo": {
            "batch_size": 4,
            "samples_per_prompt": 3,
            "sampling": {"max_new_tokens": 8},
            "kl": {"coefficient": 0},
            "update": {"mini_batches": 3},
            "optimizer": OPTIMIZER,
        },
        "output_dir": str(folder / "runs"),
        "steps": 2,
    }


def three_calls(generate: str, reward: str, actor: str) -> Compact:
    """Where the model function calls of that flow go."""
    placed = {"actor_generate": f"{generate} engine=vllm", "reward_inference": f"{reward} engine=megatron"}
    return placed | {"actor_train": f"{actor} engine=megatron"}


ROW_SETS_PLANS = {
    "alone": three_calls("0", "0", "0"),
    "replicas, other rows elsewhere": three_calls("0-1 dp2", "2-3 dp2", "0-3 dp4"),
    "pipeline": three_calls("0-3 dp2 tp2", "0-3 pp4", "0-3 dp2 pp2 micro_batches=2"),
    "shards": three_calls("0-3 tp4", "0", "0-3 tp2 pp2 micro_batches=2"),
}
SCORES = """
def parity(row):
    return float(sum(map(ord, row["response"])) % 3 == 0)

def nothing(row):
    return 0.0
"""
PLACES = {
    "alone": ("0", "0", "0"),
    "replicas": ("0-1 dp2", "0-1 dp2", "0-1 dp2"),
    "pipeline of replicas": ("0-3 dp2 tp2", "0-1 pp2", "0-3 dp2 pp2 micro_batches=2"),
}


def keeping(
    flow: AlgorithmFlow, computations: Sequence[str], calls: Sequence[str], names: Sequence[str], **algo: Any
) -> Case:
    """A run that keeps some rows by a function's score; it takes the parameters of these names."""

    def given(folder: Path) -> dict[str, Any]:
        actor = {"path": make_model(folder / "actor", layers=4, hidden=128, heads=4), "dtype": "float32"}
        (folder / "some_rewards.py").write_text(SCORES)
        prompts = make_prompts(folder / "prompts.parquet", num_train=12)
        common = {
            "prompts": {"path": prompts},
            "actor": actor,
            "reward": {"functions": {"parity": {"function": f"{folder / 'some_rewards.py'}:parity"}}},
            "algo": {"batch_size": 3, "update": {"mini_batches": 2}, "optimizer": OPTIMIZER} | algo,
            "output_dir": str(folder / "runs"),
            "steps": 2,
        }
        more = {"held_out": {"path": prompts, "split": "held_out"}, "ref": actor}
        return common | {name: more[name] for name in names}

    def placed(generate: str, infer: str, train: str) -> Compact:
        train = train if flow is grpo else train.removesuffix(" micro_batches=2")  # of fewer items
        places = {
            "actor_generate": generate,
            "actor_evaluation": generate,
            "ref_inference": infer,
            "actor_train": train,
        }
        return {call: f"{places[call]} engine=megatron" for call in calls}

    plans = {name: placed(*where) for name, where in PLACES.items()}
    return Case(flow, given, plans, computations)


GROUPS_ALONE = grpo_plan("0 engine=megatron", "0", "0", "0")
GROUPS_STREAMED = grpo_plan("0 engine=megatron parts=3", "1 parts=6", "1", "0-1 dp2") | {
    "actor_evaluation": "0 engine=megatron parts=8",
    "reward_evaluation": "1 engine=megatron parts=4",
}
"""Six groups in 3 and 6 parts; the reference model reads the chosen rows, so it has no parts. 16 rows are evaluated."""


def conversations(folder: Path) -> dict[str, Any]:
    """The parameters of PPO whose rows are plays of up to three turns, which score themselves."""
    given = {name: value for name, value in parameters(folder).items() if name != "reward"}
    return given | {"play": {"function": f"{PLAYS}:guesses", "max_tokens": 24, "max_turns": 3}}


def without_reward(compact: Compact) -> Compact:
    """A plan of PPO without the calls of the reward model."""
    return {call: words for call, words in compact.items() if not call.startswith("reward")}


GROUPS = {"samples_per_prompt": 3, "sampling": {"max_new_tokens": 8}, "kl": {"coefficient": 0}}
RECORDED = ("no_advantages", "record_rollouts")
CASES = {
    "ppo": Case(ppo, parameters, {"alone": ONE, "taking turns": TAKING_TURNS, **FOUR_RANKS}),
    "qwen3": Case(ppo, partial(parameters, family="qwen3", kv_heads=2), {"alone": ONE, **FOUR_RANKS}),
    "shared trunk": Case(ppo, shared_trunk, TRUNK_PLANS),
    "two row sets": Case(with_pretraining, two_row_sets, ROW_SETS_PLANS, ("grpo_advantages", "record_rollouts")),
    "streamed groups": Case(
        grpo,
        lambda folder: grpo_parameters(parameters(folder)),
        {"alone": GROUPS_ALONE, "streamed": GROUPS_STREAMED},
        COMPUTATIONS_OF_GRPO,
    ),
    "plays": Case(
        ppo,
        conversations,
        {
            "alone": without_reward(ALONE),
            "streamed": without_reward(
                plan("0-1 dp2 engine=megatron parts=4", "0", "2 parts=4", "3 parts=8", "0-3 dp4", "2-3 dp2")
            ),
        },
    ),
    "grpo": keeping(
        grpo,
        ("score", "informative", "grpo_advantages", "record_rollouts", "reward_evaluation", "record_evaluation"),
        ("actor_generate", "actor_train", "actor_evaluation"),
        ["held_out"],
        over_sampling=2,
        **GROUPS,
    ),
    "best": keeping(keeps_best, ("score", "best", *RECORDED), ("actor_generate", "actor_train"), [], **GROUPS),
    "pairs": keeping(
        keeps_pairs, ("score", "best_and_worst", *RECORDED), ("actor_generate", "ref_inference", "actor_train"), ["ref"]
    ),
}
