"""The plans under which one run must give one result, and that run: real Prefect, gang and engines, tiny models.

The critic is deeper and narrower than the actor, and its layers do not divide by 4, so pipelines are uneven. float32
and Adam with eps 1e-3: with 1e-8 an element whose gradient is nearly 0 takes a whole step in a direction that rounding
decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq
import yaml
from safetensors.torch import load_file

from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.placement.lease import ENVIRONMENT_VARIABLE, Lease
from prefect_rlhf.placement.mesh import DeviceMesh
from tests.tiny import make_model, make_prompts

ROWS, MINI_BATCHES, STEPS = 16, 2, 2
OPTIMIZER = {"lr": 2e-3, "eps": 1e-3}
SEED = 2  # seed 1 draws tokens so unlikely that the first gradient has a norm of 80, which rounds beyond 1e-5
Compact = Mapping[str, str]
"""Call -> `devices engine degrees`, e.g. `0-1 megatron dp2 micro_batches=2`; see `plan_file`."""

COMPUTATIONS = ("kl_penalised_rewards", "gae", "record_rollouts", "record_evaluation")
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

FOUR_RANKS: Mapping[str, Compact] = MappingProxyType(
    {
        "dp4": plan("0-3 dp4 engine=vllm", "0-3 dp4", "0-3 dp4", "0-3 dp4", "0-3 dp4", "0-3 dp4"),
        "tp4": plan("0-3 tp4 engine=vllm", "0-3 dp2 tp2", "0-3 tp4", "0-3 tp2 dp2", "0-3 tp4", "0-3 dp2 tp2"),
        "pp4": plan("0-3 dp4 engine=vllm", "0-3 pp4", "0-3 pp4", "0-3 pp4", "0-3 pp4", "0-3 pp4 micro_batches=2"),
        "dp2 tp2, micro-batches": plan(
            "0-3 dp2 tp2 engine=vllm cache_gib=0.0002",
            "0-3 dp4",
            "0-3 dp2 tp2 micro_batches=2",
            "0-3 dp2 pp2 micro_batches=4",
            "0-3 dp2 tp2 micro_batches=4",
            "0-3 dp2 tp2 micro_batches=2",
        ),
        "dp2 pp2": plan(
            "0-3 dp4 engine=vllm",
            "0-3 dp2 pp2",
            "0-3 dp2 pp2",
            "0-3 dp2 pp2",
            "0-3 dp2 pp2 micro_batches=4",
            "0-3 dp2 pp2 micro_batches=4",
        ),
        "tp2 pp2": plan("0-3 tp4 engine=vllm", "0-3 tp2 pp2", "0-3 tp2 pp2", "0-3 dp4", "0-3 tp2 pp2", "0-3 pp2 tp2"),
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
            "0-3 tp2 pp2 engine=megatron", "2-3 dp2", "0-1 tp2", "0-3 dp4", "0-3 dp2 tp2", "2-3 pp2"
        ),
    }
)

ALONE = plan("0 engine=megatron", "0", "0", "0", "0", "0")
TWO_RANKS = plan("0-1 dp2 engine=megatron", "0-1 dp2", "0-1 dp2", "0-1 pp2", "0-1 dp2", "0-1 dp2")
"""The same on one device and in two replicas, for batches that do not divide by two."""

SPLIT_ACTOR = plan("0-1 tp2 engine=vllm", "0-1 dp2", "0-1 pp2", "0-1 dp2", "0-1 tp2", "0-1 dp2")
"""The actor split over two ranks wherever it generates and trains."""

REAL_EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "real_1x8.yaml"
"""ReaL's implementation notes: the (1, 8) mesh, each call with a mesh and strategy of its own."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run made: tokens and log-probabilities by step, metrics by step, final weights by role."""

    tokens: list[list[list[int]]]
    logprobs: list[list[list[float]]]
    metrics: list[Mapping[str, float]]
    weights: Mapping[str, Mapping[str, Any]]
    spans: list[Mapping[str, Any]]

    @classmethod
    def read(cls, run_dir: Path) -> Result:
        """From a run's folder."""
        return cls(
            tokens=rollouts(run_dir, "tokens"),
            logprobs=rollouts(run_dir, "logprobs"),
            metrics=_lines(run_dir / "metrics.jsonl"),
            weights={file.parent.name: load_file(file) for file in run_dir.glob("*/model.safetensors")},
            spans=_lines(run_dir / "task_runs.jsonl"),
        )


def rollouts(run_dir: Path, column: str) -> list[Any]:
    """A column of what a run recorded, by step."""
    return [pq.read_table(file).column(column).to_pylist() for file in sorted((run_dir / "rollouts").glob("*.parquet"))]


COMPARED = tuple(
    f"{call}.{name}" for call in ("actor_train", "critic_train") for name in ("loss", "grad_norm", "initial_loss")
)


def loss_difference(one: Result, other: Result) -> float:
    """The largest difference of any step's losses and gradient norms, relative to their size where that is over 1."""
    return max(
        abs(a[name] - b[name]) / max(1.0, abs(a[name]))
        for a, b in zip(one.metrics, other.metrics, strict=True)
        for name in COMPARED
        if name in a
    )


def weight_difference(one: Result, other: Result) -> float:
    """The largest difference of any element of the final weights."""
    return max(
        float((values - other.weights[role][name]).abs().max())
        for role, weights in one.weights.items()
        for name, values in weights.items()
    )


def first_differences(one: Result, other: Result) -> list[tuple[int, int, int, float]]:
    """(step, row, position, difference of log-probabilities there) where a row's tokens first differ.

    Only of the first step with any: what follows was trained on other tokens.
    """
    for step, (left, right) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        found = []
        for row, (a, b) in enumerate(zip(left, right, strict=True)):
            position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if position is not None or len(a) != len(b):
                place = min(len(a), len(b)) if position is None else position
                at = place - (len(a) - len(one.logprobs[step][row]))
                found.append((step, row, place, abs(one.logprobs[step][row][at] - other.logprobs[step][row][at])))
        if found:
            return found
    return []


def plan_file(compact: Compact, path: Path, computations: Sequence[str] = COMPUTATIONS, per_node: int = 8) -> Path:
    """Write a plan as a plan file; its devices count through nodes that have `per_node` each."""
    calls: dict[str, dict[str, Any]] = {}
    for call, text in compact.items():
        devices, *words = text.split()
        entry = calls[call] = {"mesh": _mesh(devices, per_node).name}
        for word in words:
            if "=" in word:
                key, _, value = word.partition("=")
                entry[key] = yaml.safe_load(value)
            else:
                entry[word[:2]] = int(word[2:])
    calls |= {name: {"mesh": "n0:0", "engine": "python"} for name in computations}
    path.write_text(json.dumps({"name": path.stem, "calls": calls}))
    return path


def parameters(folder: Path, family: str = "llama", kv_heads: int | None = None) -> dict[str, Any]:
    """A PPO run's parameters; models and prompts are written into `folder`. The actor is of a family."""
    actor = make_model(folder / "actor", layers=4, hidden=128, heads=4, family=family, kv_heads=kv_heads)
    critic = make_model(folder / "critic", scalar=True, layers=6, hidden=64, heads=4)
    reward = make_model(folder / "reward", scalar=True, layers=5, hidden=128, heads=4)
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


def _mesh(devices: str, per_node: int) -> DeviceMesh:
    first, _, last = devices.partition("-")
    (node, begin), (last_node, end) = divmod(int(first), per_node), divmod(int(last or first), per_node)
    return DeviceMesh(node, last_node - node + 1, begin, end - begin + 1)


def grpo_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of GRPO with the models and prompts of that run of PPO; of six groups four are trained on."""
    algo = {name: given["algo"][name] for name in ("sampling", "evaluate_every", "update")}
    groups = {"batch_size": 4, "samples_per_prompt": 4, "over_sampling": 1.5, "optimizer": OPTIMIZER}
    kept = {name: value for name, value in given.items() if name != "critic"}
    return kept | {"algo": algo | groups | {"kl": {"coefficient": 0.1}}}


@contextmanager
def leased(num_devices: int, nodes: int = 1, kinds: Sequence[Mapping[str, Any]] = ()) -> Iterator[None]:
    """As the worker does: the environment says which devices this process may use, of which kinds of nodes."""
    of_kinds = {"node_kinds": kinds} if kinds else {"num_nodes": nodes}
    cluster = Cluster(cluster="matrix", devices_per_node=num_devices // nodes, **of_kinds).shape
    lease = Lease("matrix", "test", cluster, cluster.whole, cluster.whole.devices())
    before = os.environ.get(ENVIRONMENT_VARIABLE)
    os.environ[ENVIRONMENT_VARIABLE] = lease.to_json()
    try:
        yield
    finally:
        os.environ.pop(ENVIRONMENT_VARIABLE)
        if before is not None:
            os.environ[ENVIRONMENT_VARIABLE] = before


def run(
    given: Mapping[str, Any],
    plan: Compact | Path,
    name: str,
    num_devices: int = 4,
    nodes: int = 1,
    kinds: Sequence[Mapping[str, Any]] = (),
    **changes: Any,
) -> Result:
    """Run PPO under a plan, or GRPO without a critic, with as many ranks on `nodes` together, which may be of `kinds`.

    A Prefect server must be there; Ray for nodes.
    """
    from prefect_rlhf.flows.grpo import grpo
    from prefect_rlhf.flows.ppo import ppo

    flow, computations = (ppo, COMPUTATIONS) if "critic" in given else (grpo, COMPUTATIONS_OF_GRPO)
    file = f"{name.replace(' ', '_').replace(',', '')}.json"
    folder, per_node = Path(given["output_dir"]).parent, max(1, num_devices // nodes)
    written = (folder / file, computations, per_node if nodes > 1 else 8)
    path = plan if isinstance(plan, Path) else plan_file(plan, *written)
    with leased(num_devices, nodes, kinds):
        state = flow(**flow.validate_parameters({**given, "plan": str(path), **changes}), return_state=True)
    assert state.is_completed(), f"{name}: {state.message}"
    return Result.read(Path(state.result()["run_dir"]))


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
