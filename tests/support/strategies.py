"""Shared examples and Hypothesis strategies: clusters, models, graphs, plans, layouts."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
from hypothesis import strategies as st

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.engine_traits import engines_of
from prefect_rlhf.placement.graph import Call, DataflowGraph, Dataset, Operation, Port
from prefect_rlhf.placement.models.model import (
    QUERY_BIASES,
    Experts,
    FollowSpec,
    ModelSpec,
    SlidingWindow,
    TransformerShape,
)
from prefect_rlhf.placement.plan import ExecutionPlan, Placement, instances
from prefect_rlhf.placement.plans.check import violations
from prefect_rlhf.placement.row_set import RowSet
from prefect_rlhf.placement.rows.shares import num_groups
from prefect_rlhf.placement.words.rows_first import sends_rows

GIB = 1 << 30
SMALL = TransformerShape(
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=256,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
)
QWEN2 = replace(SMALL, family="qwen2", biases=QUERY_BIASES)
QWEN3 = replace(SMALL, family="qwen3", qk_norm=True, num_kv_heads=1, tied_embeddings=False)
GEMMA3 = replace(
    SMALL,
    family="gemma3_text",
    qk_norm=True,
    norms_after=True,
    num_kv_heads=1,
    window=SlidingWindow(64, (0, 1, 2), 1e4),
)
MIXTURE = replace(QWEN3, family="qwen3_moe", intermediate_size=64, experts=Experts(count=8, per_token=2))
"""As small, with the weights of other families; of one key-value head tp makes copies."""
SMOLLM2 = replace(
    SMALL,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_attention_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
)
TWO_DEVICES = ClusterShape("embedded", 1, 2, 8 * GIB)
ROLLOUT = ("tokens", "prompt_length", "logprobs", "truncated")
SCORES = {"reward_inference": ("scores",)}


def model(role: str, head: str = "lm", shape: TransformerShape = SMALL) -> ModelSpec:
    return ModelSpec(role, f"/models/{role}", head, shape)  # type: ignore[arg-type]


PROMPTS, HELD_OUT = RowSet("prompts", "prompts"), RowSet("held_out", "held_out")


def generated(name: str, batch: RowSet = PROMPTS, samples: int = 1) -> RowSet:
    """The rows that a generate makes."""
    return RowSet(name, batch.dataset, samples, batch)


ROLLED_OUT = generated("actor_generate")


def call(name: str, kind: str, role: str | None, reads: dict[str, tuple[str, ...]], outputs=(), **more) -> Call:
    """A call whose ports are named after what they read; 8 rows a step that actor_generate made unless told."""
    ports = tuple(Port(source, source, keys) for source, keys in reads.items())
    own = generated(name) if kind == "generate" else ROLLED_OUT
    settings = {"operation": Operation("sample"), "rows": own, "num_rows": 8} | more
    return Call(name, kind, role, ports, outputs, **settings)  # type: ignore[arg-type]


def ppo(staleness: int = 0, evaluate_every: int | None = None, mini_batches: int = 1) -> DataflowGraph:
    """The six calls of PPO with advantages that carry state (the KL controller), and evaluation if asked for."""
    values = {"critic_inference": ("values",)}
    scored = {"actor_generate": ROLLOUT, "ref_inference": ("logprobs",), **SCORES, **values}
    of_actor = {"actor_generate": ROLLOUT, "advantages": ("advantages",)}
    of_critic = {"actor_generate": ROLLOUT[:2], "advantages": ("returns",), **values}
    calls = [
        call("actor_generate", "generate", "actor", {"prompts": ("prompt_tokens",)}, ROLLOUT),
        call("ref_inference", "inference", "ref", {"actor_generate": ROLLOUT[:2]}, ("logprobs",)),
        call("reward_inference", "inference", "reward", {"actor_generate": ROLLOUT[:2]}, ("scores",)),
        call("critic_inference", "inference", "critic", {"actor_generate": ROLLOUT[:2]}, ("values",)),
        call("advantages", "compute", None, scored, ("advantages", "returns"), stateful=True),
        call("actor_train_step", "train_step", "actor", of_actor, mini_batches=mini_batches),
        call("critic_train_step", "train_step", "critic", of_critic, mini_batches=mini_batches),
    ]
    if evaluate_every is not None:
        rows = generated("evaluate_generate", HELD_OUT)
        held_out = {"rows": rows, "every": evaluate_every, "num_rows": 4}
        calls += [
            call("evaluate_generate", "generate", "actor", {"held_out": ("prompt_tokens",)}, ROLLOUT, **held_out),
            call("evaluate_scores", "inference", "reward", {"evaluate_generate": ROLLOUT[:2]}, ("scores",), **held_out),
        ]
    models = (model("actor"), model("critic", "scalar"), model("ref"), model("reward", "scalar"))
    datasets = (Dataset("prompts", ("prompt_tokens",), 8), Dataset("held_out", ("prompt_tokens",), 4))
    return DataflowGraph("ppo", models, datasets, tuple(calls), staleness)


def critic_first() -> DataflowGraph:
    """PPO whose advantages are of values by the critic that the same step trained."""
    of_values = {"actor_generate": ROLLOUT, **SCORES, "critic_inference": ("values",)}
    fresh = {"actor_generate": ROLLOUT, **SCORES, "fresh_values": ("values",)}
    of_critic = {"actor_generate": ROLLOUT[:2], "scaled_returns": ("returns",)}
    calls = (
        call("actor_generate", "generate", "actor", {"prompts": ("prompt_tokens",)}, ROLLOUT),
        call("reward_inference", "inference", "reward", {"actor_generate": ROLLOUT[:2]}, ("scores",)),
        call("critic_inference", "inference", "critic", {"actor_generate": ROLLOUT[:2]}, ("values",)),
        call("returns", "compute", None, of_values, ("returns",)),
        call("scaled_returns", "compute", None, {"returns": ("returns",)}, ("returns",)),
        call("critic_train_step", "train_step", "critic", of_critic),
        call("fresh_values", "inference", "critic", {"actor_generate": ROLLOUT[:2]}, ("values",)),
        call("advantages", "compute", None, fresh, ("advantages",)),
        call("actor_train_step", "train_step", "actor", {"actor_generate": ROLLOUT, "advantages": ("advantages",)}),
    )
    models = (model("actor"), model("critic", "scalar"), model("reward", "scalar"))
    return DataflowGraph("critic_first", models, (Dataset("prompts", ("prompt_tokens",), 8),), calls)


def remax() -> DataflowGraph:
    """ReMax: a sampled and a greedy generation, one reward for each, no critic."""
    greedy = {"actor_generate_baseline": ROLLOUT[:2]}
    scored = {"actor_generate": ROLLOUT, **SCORES, "score_baseline": ("scores",)}
    calls = (
        call("actor_generate", "generate", "actor", {"prompts": ("prompt_tokens",)}, ROLLOUT),
        call("actor_generate_baseline", "generate", "actor", {"prompts": ("prompt_tokens",)}, ROLLOUT),
        call("reward_inference", "inference", "reward", {"actor_generate": ROLLOUT[:2]}, ("scores",)),
        call("score_baseline", "inference", "reward", greedy, ("scores",), rows=generated("actor_generate_baseline")),
        call("advantages", "compute", None, scored, ("advantages",)),
        call("actor_train_step", "train_step", "actor", {"actor_generate": ROLLOUT, "advantages": ("advantages",)}),
    )
    datasets = (Dataset("prompts", ("prompt_tokens",), 8),)
    return DataflowGraph("remax", (model("actor"), model("reward", "scalar")), datasets, calls)


def dpo() -> DataflowGraph:
    """DPO on preference pairs: two rows an item."""
    pairs = {"rows": RowSet("pairs", "pairs", 2), "rows_per_item": 2}
    keys = ("tokens", "prompt_length")
    calls = (
        call("ref_inference", "inference", "ref", {"pairs": keys}, ("logprobs",), **pairs),
        call("actor_train_step", "train_step", "actor", {"pairs": keys, "ref_inference": ("logprobs",)}, (), **pairs),
    )
    return DataflowGraph("dpo", (model("actor"), model("ref")), (Dataset("pairs", keys, 4),), calls)


def following(graph: DataflowGraph, every: int = 2, share: float = 0.5) -> DataflowGraph:
    """The graph with a reference that follows its actor; all its calls stand before that, or are evaluation."""
    follows = FollowSpec("actor", every, share, after=graph.calls[-1].name)
    ref = replace(graph.model("ref"), follows=follows)
    return replace(graph, models=tuple(ref if each.role == "ref" else each for each in graph.models))


def grouped() -> DataflowGraph:
    """Four responses to each of two prompts that a computation wrote; what it says of a prompt counts for them all."""
    rewritten = RowSet("rewrite", "prompts", 1, PROMPTS)
    group = {"rows": RowSet("actor_generate", "prompts", 4, rewritten)}
    keys = ("prompt_tokens", "difficulty")
    per_prompt = {key: Port("rewrite", "rewrite", (key,), rows_each=4) for key in keys}
    calls = (
        call("rewrite", "compute", None, {"prompts": keys[:1]}, keys, rows=rewritten, num_rows=2),
        call("actor_generate", "generate", "actor", {}, ROLLOUT, **group),
        call("reward_inference", "inference", "reward", {"actor_generate": ROLLOUT[:2]}, ("scores",), **group),
        call("actor_train_step", "train_step", "actor", {"actor_generate": ROLLOUT, **SCORES}, (), **group),
    )
    more = {"actor_generate": "prompt_tokens", "actor_train_step": "difficulty"}
    calls = tuple(replace(c, inputs=(*c.inputs, per_prompt[more[c.name]])) if c.name in more else c for c in calls)
    datasets = (Dataset("prompts", ("prompt_tokens",), 8),)
    return DataflowGraph("grouped", (model("actor"), model("reward", "scalar")), datasets, calls)


def uneven(graph: DataflowGraph) -> DataflowGraph:
    """The graph with an item less of each call's rows, so that they divide by nothing."""
    width = max(each.rows_per_item for each in graph)
    return replace(graph, calls=tuple(replace(each, num_rows=each.num_rows - width) for each in graph))


def dependency_graph(augmented: AugmentedGraph) -> nx.DiGraph[str]:
    """Ids of nodes, with an edge from each node to those that wait for it."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(node.id for node in augmented)
    graph.add_edges_from((before, node.id) for node in augmented for before in node.depends_on)
    return graph


def placed(plan: ExecutionPlan, name: str, **changes) -> ExecutionPlan:
    """`plan` with some fields of one call's placement changed; mesh as a name, dp, tp, pp, ep as numbers."""
    old = plan[name]
    axes = [axis for axis in ("dp", "tp", "pp", "ep") if axis in changes]
    strategy = replace(old.strategy, **{axis: changes.pop(axis) for axis in axes})
    if "mesh" in changes:
        changes["mesh"] = DeviceMesh.parse(changes["mesh"])
    new = replace(old, strategy=strategy, **changes)
    return replace(plan, placements=tuple((n, new if n == name else p) for n, p in plan.placements))


def on(mesh: str, engine: str, **degrees: int) -> Placement:
    """A placement in few words: `on("n0:0-1", "vllm", dp=2)`."""
    return Placement(DeviceMesh.parse(mesh), Strategy(**degrees), engine)  # type: ignore[arg-type]


def meshes(cluster: ClusterShape) -> st.SearchStrategy[DeviceMesh]:
    """Every mesh that the cluster allows."""
    nodes, per_node = cluster.num_nodes, cluster.devices_per_node
    whole = [DeviceMesh(first, count, 0, per_node) for first in range(nodes) for count in range(1, nodes - first + 1)]
    widths = [width for width in (1, 2, 4, 8) if width < per_node]
    slices = [
        DeviceMesh(node, 1, first, width)
        for node in range(nodes)
        for width in widths
        for first in range(0, per_node - width + 1, width)
    ]
    return st.sampled_from(whole + slices)


@st.composite
def degrees(draw, num_devices: int, experts: bool = False) -> Strategy:
    """Any dp, tp, pp whose product is the number of devices; with experts any ep that divides dp."""
    tp = draw(st.sampled_from(divisors(num_devices)))
    rest = num_devices // tp
    pp = draw(st.sampled_from(divisors(rest)))
    return Strategy(rest // pp, tp, pp, draw(st.sampled_from(divisors(rest // pp))) if experts else 1)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def plans(draw, graph: DataflowGraph, cluster: ClusterShape, offload: bool = True) -> ExecutionPlan:
    """A legal plan: any mesh and strategy for each call, rows in parts, any of the instances offloaded or in an
    order of its own, rows first or not."""
    placements = []
    for each in graph:
        if each.kind == "compute":
            mesh = draw(meshes(cluster).filter(lambda mesh: mesh.num_devices == 1))
            placements.append((each.name, Placement(mesh, Strategy(), "python")))
            continue
        mesh = draw(meshes(cluster))
        experts = graph.model(each.role or "").shape.experts is not None
        engine, *_ = engines_of(each.kind)
        options = degrees(mesh.num_devices, experts).map(lambda s, m=mesh, e=engine: Placement(m, s, e))
        legal = options.filter(lambda placement, e=each: not list(violations(e, placement, graph, cluster.backend)))
        drawn = draw(legal)
        if each.kind == "train_step":
            divides = drawn.strategy.tp > 1 and draw(st.booleans())
            drawn = replace(drawn, recompute=draw(st.sampled_from([0, 1, "all"])), sequence_parallel=divides)
        else:
            cuts = (replace(drawn, parts=parts) for parts in divisors(num_groups(graph, each)))
            drawn = draw(
                st.sampled_from([cut for cut in cuts if not list(violations(each, cut, graph, cluster.backend))])
            )
        placements.append((each.name, drawn))
    plan = ExecutionPlan("drawn", cluster, tuple(placements))
    for instance, calls in instances(graph, plan).items():
        if draw(st.booleans()):
            order = tuple(draw(st.permutations(range(instance.mesh.num_devices))))
            for each in calls:
                plan = placed(plan, each.name, device_order=order)
    for calls in instances(graph, plan).values() if offload else ():
        trained = any(each.kind == "train_step" for each in calls)
        part = draw(st.sampled_from(["none", "all", "optimizer"] if trained else ["none", "all"]))
        prefetch = part == "none" or draw(st.booleans())
        for each in calls:
            plan = placed(plan, each.name, offload=part, prefetch=prefetch)
    return draw(_with_rows_first(plan, graph))


@st.composite
def _with_rows_first(draw, plan: ExecutionPlan, graph: DataflowGraph) -> ExecutionPlan:
    for each in graph:
        if sends_rows(each, graph) and draw(st.booleans()):
            plan = placed(plan, each.name, rows_first=True)
    return plan


def graphs() -> st.SearchStrategy[DataflowGraph]:
    """PPO with and without evaluation and staleness, ReMax, DPO, a reference that follows, groups with own columns.

    With eight rows a step, or (but for groups) seven.
    """
    variants = st.builds(
        ppo,
        staleness=st.integers(0, 2),
        evaluate_every=st.sampled_from([None, 1, 2, 3]),
        mini_batches=st.sampled_from([1, 2]),
    )
    followed = st.builds(following, st.one_of(st.builds(ppo, st.integers(0, 2)), st.builds(dpo)), st.integers(1, 3))
    even = st.one_of(variants, st.builds(remax), st.builds(dpo), followed)
    return st.one_of(even, even.map(uneven), st.builds(grouped))
