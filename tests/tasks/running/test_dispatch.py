"""From nodes to orders on real ranks: every call is given its rows, and no rank keeps what nobody will use.

The engines compute nothing (see row_world), so what is under test is the controller, the stores and the exchange.
"""

from dataclasses import replace
from types import MappingProxyType

import pytest

from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.placement.augmented.row_uses import row_uses
from prefect_rlhf.placement.augmented.work import Generate
from prefect_rlhf.placement.cost.paged_cache import whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import Operation, Port
from prefect_rlhf.placement.memory.certificate import certify
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.row_set import RowSet
from prefect_rlhf.tasks.running.commands import call_commands
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from tests.support.strategies import GIB, ROLLOUT, call, on, ppo
from tests.tasks import row_world

pytestmark = pytest.mark.slow

FOUR = ClusterShape("four", 1, 4, 8 * GIB)
SLOW_HALF = ClusterShape("halves", 2, 2, 8 * GIB, node_speeds=(1.0, 0.5))
COLOCATED = {
    "actor_generate": on("n0:0-3", "vllm", dp=4),
    "ref_inference": on("n0:0-3", "megatron", dp=4),
    "reward_inference": on("n0:0-3", "megatron", dp=4),
    "critic_inference": on("n0:0-3", "megatron", dp=4),
    "actor_train_step": on("n0:0-3", "megatron", dp=4),
    "critic_train_step": on("n0:0-3", "megatron", dp=4),
}
PIPELINES = {
    "actor_generate": on("n0:0-3", "vllm", dp=2, tp=2),
    "ref_inference": on("n0:0-3", "megatron", pp=4),
    "reward_inference": on("n0:0-3", "megatron", dp=2, pp=2),
    "critic_inference": on("n0:2-3", "megatron", pp=2),
    "actor_train_step": on("n0:0-3", "megatron", dp=2, pp=2),
    "critic_train_step": on("n0:0-1", "megatron", tp=2),
}
TWO_NODES = {
    "actor_generate": on("n0-1:0-1", "vllm", dp=4),
    "ref_inference": on("n1:0-1", "megatron", dp=2),
    "reward_inference": on("n0:0-1", "megatron", tp=2),
    "critic_inference": on("n0-1:0-1", "megatron", dp=2, pp=2),
    "actor_train_step": on("n0-1:0-1", "megatron", dp=2, tp=2),
    "critic_train_step": on("n0-1:0-1", "megatron", dp=4),
}
PLANS = {"colocated": (FOUR, COLOCATED), "pipelines": (FOUR, PIPELINES), "two nodes": (SLOW_HALF, TWO_NODES)}


@pytest.fixture(scope="module")
def gang():
    gang = LocalGang(
        GangSettings(4, row_world.OpenRank, environment={"OMP_NUM_THREADS": "1"}, preload=("torch.distributed",))
    )
    yield gang
    gang.close()


def started(gang, name, folder, num_steps=2, num_rows=8, change=lambda graph: graph, more=MappingProxyType({})):
    """A dispatcher with all engines built. `change` edits the graph, and `more` places the calls that it adds."""
    cluster, placements = PLANS[name]
    placements = placements | more
    graph = row_world.with_operations(ppo(mini_batches=2))
    graph = change(replace(graph, calls=tuple(replace(call, num_rows=num_rows) for call in graph)))
    plan = ExecutionPlan(name, cluster, tuple((placements | {"advantages": on("n0:0", "python")}).items()))
    check_plan(plan, graph, cluster.whole)
    dispatcher = Dispatcher(row_world.training_run(graph, plan, num_steps, folder), gang)
    dispatcher.build(lambda instance, outcome: None)
    return dispatcher


def held(gang, step):
    """(rank, call, key) of all rows of a step on all ranks."""
    answers = gang.call(
        row_world.OpenRank.store_keys, dict.fromkeys(range(4), (step,)), doing="look", deadline_seconds=10
    )
    return {(rank, *key) for rank, keys in answers.items() for key in keys}


@pytest.mark.parametrize("num_rows", [8, 7, 2])
@pytest.mark.parametrize("name", PLANS)
def test_calls_get_their_rows_and_stores_are_empty_after_each_step(gang, tmp_path, name, num_rows):
    """After each node a rank holds only keys that a later node of the step uses there; after the last one nothing.

    Seven rows divide by nothing; of two most replicas have none.
    """
    dispatcher = started(gang, name, tmp_path, num_rows=num_rows)
    augmented, run = row_world.whole_graph(dispatcher.run), dispatcher.run
    for step in (1, 2):
        nodes = [node for node in augmented.of_step(step) if node.kind != "export"]
        most = 0
        for index, node in enumerate(nodes):
            outcome = dispatcher.execute(node)
            uses = [row_uses(augmented.graph, augmented.plan, later) for later in nodes[index + 1 :]]
            wanted = {(run.rank(d), *key) for found in uses for d, keys in found.items() for key in keys}
            assert held(gang, step) <= wanted
            most = max([most, *outcome.store_bytes.values()])
            assert node.kind != "compute" or outcome.metrics["rows"] == num_rows, "it asserts every column of its rows"
        dispatcher.finish_step(step, oldest=step + 1)
        assert most > 0
        assert held(gang, step) == set()
    store_bytes = gang.call(
        row_world.OpenRank.store_bytes, dict.fromkeys(range(4), ()), doing="look", deadline_seconds=10
    )
    assert set(store_bytes.values()) == {0}


@pytest.mark.parametrize("num_rows", [8, 7, 6, 2])
@pytest.mark.parametrize("name", PLANS)
def test_a_replica_makes_room_for_the_rows_that_it_generates_which_the_certificate_counts(
    gang, tmp_path, name, num_rows
):
    """Six rows on nodes of two speeds, in two mini-batches, are dealt as 3, 2, 1 and 0; room is made for one at least.

    The certificate's cache holds as many rows on each device.
    """
    dispatcher = started(gang, name, tmp_path, num_steps=1, num_rows=num_rows)
    augmented, run = row_world.whole_graph(dispatcher.run), dispatcher.run
    generate = next(node for node in augmented if isinstance(node.work, Generate))
    for node in augmented:
        dispatcher.execute(node)
        if node == generate:
            break
    instance, sizes = generate.work.instance, ModelSizes.of(run.graph.model("actor"))
    peaks = {peak.device: peak.shares for peak in certify(augmented, Workload.fixed(8, 8), "cuda").peaks}
    for device in instance.devices:
        asked = {run.rank(device): (instance,)}
        ((room, rows),) = gang.call(row_world.OpenRank.room_and_rows, asked, doing="look", deadline_seconds=10).values()
        assert room == max(rows, 1)
        cache = sum(share.num_bytes for share in peaks[str(device)] if share.what == "key-value cache")
        assert cache == whole_cache_bytes(room, 16, sizes, instance.strategy.tp)
    assert name != "two nodes" or num_rows != 6 or rows == 0


def with_children(graph):
    """The graph, with two further responses to each prompt, whose scores a computation reads by the rollout's rows."""
    prompts = graph.call("actor_generate").rows.parent
    again = RowSet("again", "prompts", 2, prompts)
    own, reads = graph.call("actor_generate").rows, {"again": ROLLOUT[:2]}
    many = {"rows": again, "num_rows": 2 * graph.call("actor_generate").num_rows}
    ports = (Port("actor_generate", "actor_generate", ("tokens",)), Port("scores", "scores", ("scores",), children=2))
    compute = replace(graph.call("advantages"), name="values", inputs=ports, outputs=("values",), stateful=False)
    checked = replace(compute, operation=row_world.check_children().operation, rows=own)
    more = (
        replace(graph.call("actor_generate"), name="again", draws="again", **many),
        replace(call("scores", "inference", "reward", reads, ("scores",), **many), operation=Operation("scores")),
        checked,
    )
    return replace(graph, calls=(*graph.calls[:-2], *more, *graph.calls[-2:]))


@pytest.mark.parametrize("num_rows", [8, 7])
def test_a_computation_gets_all_scores_of_the_rows_made_from_each_row(gang, tmp_path, num_rows):
    """From all replicas that have some of them."""
    more = {
        "again": COLOCATED["actor_generate"],
        "scores": COLOCATED["reward_inference"],
        "values": on("n0:0", "python"),
    }
    dispatcher = started(gang, "colocated", tmp_path, 1, num_rows, with_children, more)
    seen = {}
    for node in row_world.whole_graph(dispatcher.run):
        if node.kind != "export":
            seen[node.id] = dispatcher.execute(node)
    assert seen["values@1"].metrics["rows"] == num_rows, "it asserts the scores of each row"
    assert "transfer.values@1" in seen and held(gang, 1) == set()
    dispatcher.finish_step(1, oldest=2)


def test_a_key_is_freed_right_after_its_last_consumer(gang, tmp_path):
    """Scores and reference log-probabilities have one reader; once the computation has run nobody has them."""
    dispatcher = started(gang, "pipelines", tmp_path, 1)
    seen = {}
    for node in row_world.whole_graph(dispatcher.run):
        if node.kind != "export":
            dispatcher.execute(node)
            seen[node.id] = {(call, key) for _, call, key in held(gang, 1)}
    assert ("reward_inference", "scores") in seen["transfer.advantages@1"]
    assert ("reward_inference", "scores") not in seen["advantages@1"]
    assert ("ref_inference", "logprobs") not in seen["advantages@1"]
    assert ("critic_inference", "values") in seen["advantages@1"], "the critic's train_step reads them too"
    assert seen[next(reversed(seen))] == set()


def test_rows_of_different_lengths_are_divided_by_tokens(gang, tmp_path):
    """What each replica is told to train on: two mini-batches of the same rows, tokens as even as one row allows."""
    dispatcher = started(gang, "pipelines", tmp_path, 1)
    for node in row_world.whole_graph(dispatcher.run):
        if node.id == "actor_train_step@1":
            break
        dispatcher.execute(node)
    orders = call_commands(dispatcher.run, node, node.work, dispatcher.rows)
    dispatcher.rows.finish(1)
    assert orders[0].rows == orders[2].rows and orders[1].rows == orders[3].rows, "stages of one replica"
    assert sorted(orders[0].rows + orders[1].rows) == list(range(8))
    tokens = [[row_world.length(i) for i in orders[rank].row_ids] for rank in (0, 1)]
    assert [list(orders[rank].lengths) for rank in (0, 1)] == tokens
    for order in (orders[0], orders[1]):
        first = order.passes[0].mini_batch_rows[0]
        assert {row // 4 for row in order.rows[:first]} == {0} and {row // 4 for row in order.rows[first:]} == {1}
    assert abs(sum(tokens[0]) - sum(tokens[1])) <= 2 * max(map(row_world.length, range(40)))


@pytest.mark.parametrize("name", PLANS)
def test_each_row_set_of_a_train_step_is_divided_separately(gang, tmp_path, name):
    """Every row of both is trained on once by each shard, beside its own columns alone, and nothing is kept."""
    dispatcher = started(gang, name, tmp_path, 1, change=row_world.with_pretrain)
    metrics = {node.id: dispatcher.execute(node).metrics for node in row_world.whole_graph(dispatcher.run)}
    assert metrics["actor_train_step@1"]["rows"] > 0
    assert not held(gang, 1)
    call = dispatcher.run.graph.call("actor_train_step")
    dealt = [
        sorted(row for need in set(part.needs().values()) for row in need.share.rows())
        for part in dispatcher.rows.by_row_set[call.name]
    ]
    assert dealt[1][:: len(dealt[1]) // 6] == list(range(6))
    dispatcher.rows.finish(1)


def test_ranks_with_the_same_rows_get_them_in_the_same_order(gang, tmp_path, monkeypatch):
    """So it is made and pickled once, however many they are."""
    given = {}

    def noted(run, node, work, rows):
        given[node.id] = call_commands(run, node, work, rows)
        return given[node.id]

    monkeypatch.setattr("prefect_rlhf.tasks.running.dispatch.call_commands", noted)
    dispatcher = started(gang, "two nodes", tmp_path, 1)
    for node in row_world.whole_graph(dispatcher.run):
        dispatcher.execute(node)
    dispatcher.finish_step(1, oldest=2)
    for orders in given.values():
        different = {(order.rows, order.keys, order.frees) for order in orders.values()}
        assert len({id(order) for order in orders.values()}) == len(different)
    assert len({id(order) for order in given["actor_train_step@1"].values()}) == 2, "four ranks, two replicas"


def test_a_transfer_involves_only_its_senders_and_receivers(gang, tmp_path, monkeypatch):
    """Who sends, receives or frees rows; where all rows lie where they are needed, nobody."""
    asked, call = {}, gang.call

    def noted(method, arguments, **settings):
        if method is Rank.transfer:
            asked[settings["doing"]] = arguments
        return call(method, arguments, **settings)

    monkeypatch.setattr(gang, "call", noted)
    dispatcher = started(gang, "pipelines", tmp_path, 1)
    transfers = [node for node in row_world.whole_graph(dispatcher.run) if node.kind == "transfer"]
    for node in row_world.whole_graph(dispatcher.run):
        outcome = dispatcher.execute(node)
        assert node.kind != "transfer" or set(outcome.store_bytes) == set(map(str, asked[node.title]))
    dispatcher.finish_step(1, oldest=2)
    assert all(order.transfers or order.frees for orders in asked.values() for (order,) in orders.values())
    assert any(len(asked[node.title]) < len(node.devices) for node in transfers)


def test_all_replicas_know_who_lacks_rows_in_a_mini_batch(gang, tmp_path):
    """Two replicas, with a mini-batch of one row and one of two: all four ranks are told."""
    dispatcher = started(gang, "pipelines", tmp_path, 1, num_rows=3)
    for node in row_world.whole_graph(dispatcher.run):
        if node.id == "actor_train_step@1":
            break
        dispatcher.execute(node)
    orders = call_commands(dispatcher.run, node, node.work, dispatcher.rows)
    dispatcher.rows.finish(1)
    assert sorted(orders[rank].passes[0].mini_batch_rows for rank in range(4)) == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert all(order.passes[0].some_without_rows for order in orders.values())


def test_data_that_no_later_node_needs_is_dropped(gang, tmp_path):
    """Rows of finished steps and fingerprints of old versions do not pile up over a long run."""
    dispatcher = started(gang, "colocated", tmp_path, num_steps=5)
    rows, fingerprints, weights = dispatcher.rows, dispatcher.fingerprints, dispatcher.run.graph.all_weights()
    for step in range(1, 6):
        for node in row_world.whole_graph(dispatcher.run).of_step(step):
            if node.kind != "export":
                dispatcher.execute(node)
        assert rows.told(step)
        dispatcher.finish_step(step, oldest=step + 1)
        assert not any((rows._told, rows._row_ids, rows._uses_left, rows._versions))
        names = {own.name for own in weights}
        versions = {name: sorted(v for other, v in fingerprints._learned if other == name) for name in names}
        trained = [step - 1, step]  # what the next step reads, and the one before
        assert versions == {own.name: trained if own.trained else [0] for own in weights}


def test_calls_on_the_same_rows_share_their_numbers(gang, tmp_path):
    """They are computed once a step, not once a call."""
    dispatcher = started(gang, "colocated", tmp_path)
    rows, calls = dispatcher.rows, dispatcher.run.graph.calls
    numbers = {id(rows.row_ids(call, 1)) for call in calls}
    assert len(numbers) == 1
    assert rows.row_ids(calls[0], 1) != rows.row_ids(calls[0], 2)
