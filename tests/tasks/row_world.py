"""Engines that compute nothing but know what they should be given: rows of PPO whose every value says whose it is.

Row i's prompt is 1 + i % 3 tokens i, its response 1 + 7 * i % 5 more; so every key of a row follows from i.
"""

from dataclasses import replace

import torch

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.engine import Generated, Shard
from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.graph import Call, DataflowGraph, Dataset, Operation, Port, Term
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance
from prefect_rlhf.placement.row_set import RowSet
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.settings import Sampling, Settings
from prefect_rlhf.tasks.tracing.operations import Bound, computation, loss
from tests.tasks.small_tokenizer import alone


def prompt(row_id: int) -> list[int]:
    return [row_id] * (1 + row_id % 3)


def response(row_id: int) -> list[int]:
    return [row_id] * (1 + 7 * row_id % 5)


def length(row_id: int) -> int:
    return len(prompt(row_id)) + len(response(row_id))


class Prompts:
    """Forty prompts."""

    name, keys, column_kinds = "prompts", ("prompt_tokens",), {}

    def __len__(self):
        return 40

    def read(self, row_ids):
        return {"prompt_tokens": [prompt(i) for i in row_ids]}


class Pretrain(Prompts):
    """The same forty prompts, each with its response."""

    name, keys = "pretrain", ("tokens", "prompt_length")

    def read(self, row_ids):
        tokens = [prompt(i) + response(i) for i in row_ids]
        return {"tokens": tokens, "prompt_length": [len(prompt(i)) for i in row_ids]}


class KnowingEngine:
    """Holds zeros where the layout says; asserts that a call is given what its stage needs, and no more."""

    def __init__(self, order, rank):
        self.instance, regions = order.instance, order.layout.of_rank(rank)
        self.max_rows, self.most_rows = order.max_rows, 0
        dtype = getattr(torch, order.model.dtype)
        self.at = order.instance.strategy.coordinates()[order.ranks.index(rank)]
        shapes = {name: [stop - start for start, stop in region] for name, region in regions.items()}
        self.shards = {name: Shard(regions[name], torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}

    def weights(self):
        return self.shards

    def weights_written(self):
        pass

    def share(self, lent):
        for owner, names in lent:
            self.shards |= {name: owner.shards[name] for name in names}

    def device_bytes(self):
        return 0

    def generate(self, prompts, sampling, seeds, micro_batches=1):
        self.most_rows = max(self.most_rows, len(prompts))
        return Generated([response(p[0]) for p in prompts], [[-float(p[0])] * len(response(p[0])) for p in prompts])

    def infer(self, sequences, output, micro_batches, temperature):
        self._check(sequences, with_tokens=output == "logprobs")
        if not self._is_last or self.at.tp:
            return None
        if output == "scores":
            return sequences.lengths_B.float()
        of_row = -sequences.tokens_BS[:, :1] if output == "logprobs" else sequences.lengths_B[:, None]
        return sequences.response_mask_BT() * of_row

    def train(self, rows, settings):
        for shard in self.shards.values():
            shard.view.add_(1)
        return {"rows": sum(self._train_on(one, settings) for one in rows)}

    def _train_on(self, rows, settings):
        self._check(rows.sequences, with_tokens=True)
        assert sum(rows.mini_batch_rows) == len(rows.sequences)
        assert len(rows.mini_batch_rows) == settings.mini_batches
        assert all(rows.mini_batch_rows) or rows.some_without_rows
        if not self._is_last or not len(rows.sequences):
            assert not any(rows.columns) or rows.terms[0].name == "kept"  # a dataset is read on every stage
            return 0.0
        made = [term.loss(torch.zeros(()), seen) for term, seen in zip(rows.terms, rows.columns, strict=True)]
        return float(sum(one.values.sum() for one in made))

    @property
    def _is_last(self):
        return self.at.pp == self.instance.strategy.pp - 1

    def _check(self, sequences, with_tokens):
        used = self.at.pp == 0 or (self._is_last and with_tokens)
        ids = sequences.tokens_BS[:, 0].tolist()
        assert [length(i) for i in ids] == sequences.lengths_B.tolist() if used else not any(ids)


class OpenRank(Rank):
    """A rank that shows which rows it keeps."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, KnowingEngine)

    def store_keys(self, step: int) -> tuple[tuple[str, str], ...]:
        return self.store.keys(step)

    def store_bytes(self) -> int:
        return self.store.num_bytes

    def room_and_rows(self, instance: ModelInstance) -> tuple[int, int]:
        """How many rows an instance makes room for, and the most that it generated at once."""
        engine = self.models[instance].engine
        return engine.max_rows, engine.most_rows


@computation("advantages", "returns", stateful=True)
def check_columns(rollout, ref, reward, critic, settings: Settings, context) -> Computed:
    """All rows of the step, each with the values that are its own."""
    ids = context.row_ids
    assert context.generated_by == "actor"
    assert [row.tolist() for row in rollout.columns["tokens"]] == [prompt(i) + response(i) for i in ids]
    for made in (rollout, ref):
        assert [row.tolist() for row in made.columns["logprobs"]] == [[-i] * len(response(i)) for i in ids]
    assert reward["scores"].tolist() == [length(i) for i in ids]
    assert [row.tolist() for row in critic.columns["values"]] == [[length(i)] * len(response(i)) for i in ids]
    return Computed({"advantages": 2 * rollout["logprobs"], "returns": 3 * rollout["logprobs"]}, {"rows": len(ids)})


@computation("values")
def check_children(rollout, scores, settings: Settings, context) -> Computed:
    """Beside each row the scores of both rows that were made of its prompt."""
    ids = context.row_ids
    assert [row.tolist() for row in rollout.columns["tokens"]] == [prompt(i) + response(i) for i in ids]
    assert scores["scores"].tolist() == [[length(i)] * 2 for i in ids]
    return Computed({"values": scores["scores"].mean(1)}, {"rows": len(ids)})


@loss("logprobs")
def check_policy_columns(_, batch, settings: Settings) -> LossValues:
    """Advantages are beside the log-probabilities of their own row."""
    assert torch.equal(batch["advantages"], 2 * batch["logprobs"])
    return LossValues(torch.ones(len(batch["logprobs"])))


@loss("values")
def check_value_columns(_, batch, settings: Settings) -> LossValues:
    """Returns, values and tokens are beside those of their own row."""
    assert torch.equal(batch["returns"], -3 * batch["tokens"][:, :1] * batch["mask"])
    lengths = torch.tensor([length(i) for i in batch["tokens"][:, 0].tolist()])
    assert torch.equal(batch["values"], lengths[:, None] * batch["mask"])
    return LossValues(torch.ones(len(batch["values"])))


@loss("logprobs")
def check_pretrain_columns(_, batch, settings: Settings) -> LossValues:
    """Tokens are those of the dataset, and no other rows' columns are there."""
    assert {key.rpartition(".")[2] for key in batch} == {"tokens", "prompt_length", "mask"}
    return LossValues(torch.ones(len(batch["tokens"])))


def with_pretrain(graph: DataflowGraph) -> DataflowGraph:
    """The graph, whose actor is trained on six rows of a dataset, too."""
    rows, ports = RowSet("pretrain", "pretrain"), (Port("pretrain", "pretrain", Pretrain.keys),)
    term = Term("kept", check_pretrain_columns().operation, ("logprobs",), ports, rows, 6, weight=0.5)
    calls = (
        replace(call, inputs=call.inputs + ports, terms=(*call.terms, term))
        if call.name == "actor_train_step"
        else call
        for call in graph
    )
    return replace(graph, calls=tuple(calls), datasets=(*graph.datasets, Dataset("pretrain", Pretrain.keys, 40)))


def term_of(call: Call, loss: Bound) -> Term:
    """A loss on all that a train_step reads."""
    operator = loss.operator
    return Term(operator.name, loss.operation, operator.outputs, call.inputs, call.rows, call.num_rows)


def with_operations(graph: DataflowGraph) -> DataflowGraph:
    """The graph of PPO with operations that can run."""
    losses = {"actor_train_step": check_policy_columns(), "critic_train_step": check_value_columns()}
    calls = []
    for call in graph:
        plain = Sampling().model_dump_json() if call.kind == "generate" else "{}"
        operation = Operation(call.outputs[0] if call.outputs else "train", plain)
        if call.name == "advantages":
            operation = check_columns(Settings()).operation
        terms = (term_of(call, losses[call.name]),) if call.name in losses else ()
        calls.append(replace(call, operation=operation, terms=terms))
    datasets = tuple(replace(dataset, num_items=40) for dataset in graph.datasets)
    return replace(graph, calls=tuple(calls), datasets=datasets)


def whole_graph(run: TrainingRun) -> AugmentedGraph:
    """All nodes of a short run."""
    return augment(run.graph, run.plan, run.num_steps, run.finished, run.checkpoint_every)


def training_run(graph: DataflowGraph, plan: ExecutionPlan, num_steps: int, folder) -> TrainingRun:
    """A run of `num_steps` on all devices of the plan's cluster."""
    mesh = plan.cluster.whole
    lease = Lease("test", "test", plan.cluster, mesh, mesh.devices())
    return TrainingRun(
        graph=graph,
        plan=plan,
        num_steps=num_steps,
        lease=lease,
        sources={"prompts": Prompts(), "pretrain": Pretrain()},
        tokenizers=alone(),
        run_dir=folder,
        seed=3,
        max_sequence_length=64,
        call_deadline_seconds=60,
    )
