"""Closed problem files of any size and graph, priced by a few lines of arithmetic on H100-like devices.

Only the proportions matter: generation is bound by memory and wants tensor parallelism, training and inference want
few stages, small meshes are slow but efficient.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

GIB = 1 << 30
LAYERS = {7: 32, 13: 40, 34: 48, 70: 80}
TOKENS = 2048  # of a prompt and its response
GPUS_PER_NODE = 8


class CallOf(NamedTuple):
    """A call of a graph: `billions` of parameters, `reads` the calls that it waits for."""

    name: str
    role: str
    kind: str
    billions: int
    reads: tuple[str, ...] = ()


Graph = tuple[CallOf, ...]


def ppo(actor: int, critic: int) -> Graph:
    """PPO: six calls."""
    inferences = tuple(
        CallOf(f"{role}_inf", role, "inference", size, ("actor_gen",))
        for role, size in (("reward", critic), ("ref", actor), ("critic", critic))
    )
    read = ("actor_gen", *(call.name for call in inferences))
    trained = (("actor", actor), ("critic", critic))
    trains = tuple(CallOf(f"{role}_train", role, "train_step", size, read) for role, size in trained)
    return (CallOf("actor_gen", "actor", "generate", actor), *inferences, *trains)


def safe_ppo(actor: int, critic: int) -> Graph:
    """PPO with a cost model and a critic of costs (Safe RLHF, arXiv:2310.12773): nine calls."""
    costs = [CallOf(f"{role}_inf", role, "inference", critic, ("actor_gen",)) for role in ("cost", "cost_critic")]
    *first, actor_train, critic_train = ppo(actor, critic)
    read = (*actor_train.reads, *(call.name for call in costs))
    trains = [call._replace(reads=read) for call in (actor_train, critic_train)]
    return (*first, *costs, *trains, CallOf("cost_critic_train", "cost_critic", "train_step", critic, read))


def greedy_safe_ppo(actor: int, critic: int) -> Graph:
    """The same with a greedy generation beside the sampled one: ten calls."""
    first, *rest = safe_ppo(actor, critic)
    return (first, first._replace(name="actor_gen_greedy"), *(_after(call, "actor_gen_greedy") for call in rest))


def distillation(student: int, teacher: int) -> Graph:
    """A student learns the logits of two teachers, a reward model learns from a judge: eight calls."""
    return (
        CallOf("student_gen", "student", "generate", student),
        CallOf("teacher_inf", "teacher", "inference", teacher, ("student_gen",)),
        CallOf("second_inf", "second", "inference", teacher, ("student_gen",)),
        CallOf("student_train", "student", "train_step", student, ("teacher_inf", "second_inf")),
        CallOf("judge_gen", "judge", "generate", teacher, ("student_gen",)),
        CallOf("reward_train", "reward", "train_step", student, ("judge_gen",)),
        CallOf("reward_inf", "reward", "inference", student, ("reward_train",)),
        CallOf("student_tune", "student", "train_step", student, ("reward_inf", "student_train")),
    )


def random_graph(num_calls: int, seed: int) -> Graph:
    """A generation first, then inferences and training steps of four roles that read some of the calls before."""
    random = Random(seed)
    sizes = {role: random.choice([7, 7, 13, 34]) for role in "abcd"}
    calls = [CallOf("gen0", "a", "generate", sizes["a"])]
    for index in range(1, num_calls):
        kind = random.choice(["generate", "inference", "inference", "train_step"])
        role = random.choice("abcd")
        reads = tuple(call.name for call in calls if random.random() < 0.4) or (random.choice(calls).name,)
        calls.append(CallOf(f"{kind}{index}", role, kind, sizes[role], reads))
    return tuple(calls)


def _after(call: CallOf, name: str) -> CallOf:
    return call._replace(reads=(*call.reads, name)) if call.kind == "train_step" else call


def closed_file(
    graph: Graph, num_nodes: int, batch: int, slices: Sequence[int] = (4,), seed: int = 0, scatter: float = 0.02
) -> dict[str, Any]:
    """The file's content. `slices` are the widths of parts of one node; costs scatter by `scatter`, as `seed` says."""
    random = Random(seed)
    meshes = list(_meshes(num_nodes, slices))
    sizes = sorted({mesh["n_gpus"] for mesh in meshes})
    strategies = {call.name: list(_strategies(call, sizes, batch, random, scatter)) for call in graph}
    trained = {call.role: call.name for call in graph if call.kind == "train_step"}
    hooks = [
        {"train": trained[call.role], "other": call.name, "size_key": call.billions}
        for call in {call.role: call for call in reversed(graph) if call.kind != "train_step"}.values()
        if call.role in trained
    ]
    return {
        "name": "generated",
        "n_nodes": num_nodes,
        "gpus_per_node": GPUS_PER_NODE,
        "device_mem_bytes": 80 * GIB,
        "iterations": 5,
        "calls": [{"name": c.name, "role": c.role, "type": c.kind, "deps": list(c.reads)} for c in graph],
        "cross_iteration_deps": [
            [train, call.name]
            for call in graph
            if call.kind != "train_step"
            for train in [trained.get(call.role)]
            if train
        ],
        "meshes": [{"id": index, **mesh} for index, mesh in enumerate(meshes)],
        "strategies": strategies,
        "realloc": {"hooks": hooks, "table_us": _moves(hooks, strategies)},
    }


def _meshes(num_nodes: int, slices: Sequence[int]) -> Iterator[dict[str, int]]:
    for node in range(num_nodes):
        for width in slices:
            for first in range(0, GPUS_PER_NODE, width):
                yield {"first_node": node, "n_nodes": 1, "first_gpu": first, "gpus_per_node": width, "n_gpus": width}
        for count in range(1, num_nodes - node + 1):
            size = count * GPUS_PER_NODE
            yield {"first_node": node, "n_nodes": count, "first_gpu": 0, "gpus_per_node": GPUS_PER_NODE, "n_gpus": size}


def _strategies(
    call: CallOf, sizes: Sequence[int], batch: int, random: Random, scatter: float
) -> Iterator[dict[str, int]]:
    for size in sizes:
        for tp in (1, 2, 4, 8):
            for pp in range(1, 17):
                if size % (tp * pp) or LAYERS[call.billions] % pp and pp > 8:
                    continue
                dp = size // tp // pp
                static, peak = _bytes(call, dp, tp, pp, batch)
                if peak > 80 * GIB or batch % dp and dp > 1 and batch // dp < 1:
                    continue
                us = round(_seconds(call, dp, tp, pp, batch) * random.uniform(1 - scatter, 1 + scatter) * 1000) * 1000
                yield {
                    "pp": pp,
                    "tp": tp,
                    "dp": dp,
                    "n_gpus": size,
                    "time_us": max(us, 1000),
                    "mem_bytes": peak,
                    "static_bytes": static,
                }


def _bytes(call: CallOf, dp: int, tp: int, pp: int, batch: int) -> tuple[int, int]:
    weights = call.billions * 10**9 * 2 // (tp * pp)
    if call.kind == "train_step":
        static = 3 * weights + call.billions * 10**9 * 12 // (tp * pp * dp)
        return static, static + TOKENS * 1024 * 80
    cache = batch * TOKENS * call.billions * 10**9 // 10**5 // (dp * tp * pp) if call.kind == "generate" else 0
    static = weights if call.role in ("actor", "critic", "student", "a") else 0
    return static, weights + cache


def _seconds(call: CallOf, dp: int, tp: int, pp: int, batch: int) -> float:
    parameters, layers = call.billions * 1e9, LAYERS[call.billions]
    flops = 2 * parameters * batch * TOKENS / (dp * tp * pp) / 6e14
    reduces = 2 * layers * batch / dp * TOKENS / pp * 4096 * 2 * 2 * (tp - 1) / tp / 2.5e11
    bubble = (2 * pp - 1) / pp
    if call.kind == "generate":
        step = parameters * 2 / (tp * pp) / 2.7e12 + batch / dp / pp * 4e-6 + layers / pp * (4.5e-5 + 1e-5 * (tp > 1))
        return 1024 * step * pp * 0.9 + flops / 2
    if call.kind == "inference":
        return (flops + reduces) * bubble + 0.001 * pp
    mini = 8
    return (3 * flops + 3 * reduces) * (1 + (pp - 1) / (2 * pp)) + mini * parameters * 4 * (dp - 1) / dp / (
        tp * pp
    ) / 2e11


def _moves(hooks: Sequence[dict[str, Any]], strategies: dict[str, list[dict[str, int]]]) -> dict[str, int]:
    """Microseconds between any two layouts of a moved model: what a device receives, and a latency a stage."""
    table = {}
    for hook in hooks:
        size = hook["size_key"]
        ends = [strategies[hook["train"]], strategies[hook["other"]]]
        for first, second in (ends, ends[::-1]):
            received = {(b["pp"], b["tp"], b["dp"]): size * 2e9 / (b["pp"] * b["tp"]) for b in second}
            for a in first:
                start = f"{size},{a['pp']},{a['tp']},{a['dp']},"
                for (pp, tp, dp), num_bytes in received.items():
                    if (pp, tp, dp) != (a["pp"], a["tp"], a["dp"]):
                        key = f"{start}{pp},{tp},{dp}"
                        table[key] = round(num_bytes * (1 - 1 / (a["pp"] * a["tp"])) / 4e10 * 1e6) + 30000 * pp
    return table
