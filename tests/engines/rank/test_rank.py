"""A rank runs commands on its engines and rows, and lets no call see weights of another version than its edge names."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prefect_rlhf.engines.commands import BuildCommand, CallCommand, MoveWeightsCommand, PassCommand
from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.engine import Generated, SamplingSettings, Shard, TrainSettings
from prefect_rlhf.engines.losses.protocol import LossTerm, LossValues
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.engines.rank.store import RowsMissing
from prefect_rlhf.engines.weights.versions import Fingerprints
from prefect_rlhf.errors.errors import EngineFailed, RlhfError, StaleWeights
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import Call, Operation, Port
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.placement.models.weights import Parameter, Weights
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.row_set import RowSet
from tests.tasks.small_tokenizer import alone

ONE = DeviceMesh(0, 1, 0, 1)
TRAINED = ModelInstance("actor", "megatron", ONE, Strategy())
SAMPLER = ModelInstance("actor", "vllm", ONE, Strategy())
SHAPES = {"embed": (64, 8), "norm": (8,)}
ACTOR = (Weights("actor", tuple(Parameter(name, shape) for name, shape in SHAPES.items()), trained=True),)
LAYOUT = Layout(SHAPES, {name: {0: tuple((0, size) for size in shape)} for name, shape in SHAPES.items()})
SHAPE = TransformerShape(8, 8, 1, 1, 1, 8, 64, 64, 1e4, 1e-5, True)
SPEC = ModelSpec("actor", "/models/actor", "lm", SHAPE, dtype="float32")
ROLLOUT = ("tokens", "prompt_length", "logprobs")


class FakeEngine:
    """A model of one number, its first weight, so that a test can tell what a call saw."""

    def __init__(self, command, rank):
        self.instance, self.seen = command.instance, {}
        self.tensors = {name: torch.ones(shape) for name, shape in command.layout.shapes.items()}
        self.parked, self.moved = False, []

    def weights(self):
        return {name: Shard(LAYOUT.regions[name][0], tensor) for name, tensor in self.tensors.items()}

    def weights_written(self):
        self.seen["written"] = True

    def device_bytes(self):
        return 0 if self.parked else sum(tensor.nbytes for tensor in self.tensors.values())

    def offload(self, part="all"):
        self.parked = self.parked or part == "all"
        self.moved.append(("offload", part))
        return 100

    def reload(self, part="all"):
        self.parked = self.parked and part != "all"
        self.moved.append(("reload", part))
        return 100

    def generate(self, prompts, sampling, seeds, micro_batches):
        """Row i's response is its prompt again, its log-probabilities minus the model's number."""
        self.seen |= {"prompts": prompts, "seeds": seeds}
        number = float(self.tensors["embed"][0, 0])
        return Generated([list(p)[: sampling.max_new_tokens] for p in prompts], [[-number] * len(p) for p in prompts])

    def infer(self, sequences, output, micro_batches, temperature):
        self.seen |= {"temperature": temperature, "micro_batches": micro_batches}
        number = float(self.tensors["embed"][0, 0])
        if output == "scores":
            return sequences.lengths_B * number
        return sequences.response_mask_BT() * -number

    def train(self, rows, settings):
        ((batch,), (term,)) = rows[0].columns, rows[0].terms
        self.seen |= {"batch": batch, "settings": settings}
        made = term.loss(torch.zeros_like(batch.get("mask", torch.zeros(1))), batch)
        self.tensors["embed"] += 1
        return {"loss": float(made.values.sum()), "grad_norm": 1.0}


class Prompts:
    """A dataset: row i's prompt is i+1 times the token i."""

    name, keys = "prompts", ("prompt_tokens",)

    def __len__(self):
        return 10

    def read(self, row_ids):
        return {"prompt_tokens": [[i] * (i + 1) for i in row_ids]}

    column_kinds = {"number": "number", "word": "text"}

    def read_column(self, name, row_ids):
        return [i if name == "number" else f"word {i}" for i in row_ids]


class Pairs:
    """A dataset of sequences that need no generation."""

    name, keys = "pairs", ("tokens", "prompt_length")

    def __len__(self):
        return 10

    def read(self, row_ids):
        return {"tokens": [[i, i, i] for i in row_ids], "prompt_length": [1 for _ in row_ids]}

    column_kinds = {}


def mean_loss(output, batch):
    return LossValues((output - batch["advantages"]) * batch["mask"])


def no_loss_here(output, batch):
    """What a stage without the loss would be given: nothing."""
    assert not batch
    return LossValues(output)


def count_steps(rollout, values, *, context, state):
    """Advantages are the log-probabilities less the values; the state counts calls."""
    advantages = rollout["logprobs"] - values["values"]
    assert rollout.mask("logprobs").shape == advantages.shape
    metrics = {"step": context.step, "calls": (state or 0) + 1, "rows": len(context.row_ids)}
    return Computed({"advantages": advantages, "length": rollout["prompt_length"].float()}, metrics, (state or 0) + 1)


@pytest.fixture
def rank():
    rank = Rank(0, 1, FakeEngine)
    rank.open_dataset(Prompts())
    rank.open_dataset(Pairs())
    for instance in (TRAINED, SAMPLER):
        rank.build(BuildCommand(SPEC, instance, (0,), LAYOUT, 64, 8))
    return rank


MADE = RowSet("generate", "prompts", 1, RowSet("prompts", "prompts"))


def call(name, kind, reads, outputs=(), **more):
    ports = tuple(Port(argument, source, keys) for argument, source, keys in reads)
    role = None if kind == "compute" else "actor"
    return Call(name, kind, role, ports, outputs, Operation("x"), more.pop("rows", MADE), 4, **more)


GENERATE = call("generate", "generate", [("prompts", "prompts", ("prompt_tokens",))], ROLLOUT)
TWO_SAMPLES = replace(GENERATE, rows=replace(MADE, samples=2))
VALUES = call("infer", "inference", [("rollout", "generate", ROLLOUT[:2])], ("values",))
COMPUTE = call(
    "advantages",
    "compute",
    [("rollout", "generate", ROLLOUT), ("values", "infer", ("values",))],
    ("advantages", "length"),
    stateful=True,
)
TRAIN = call("train", "train_step", [("rollout", "generate", ROLLOUT), ("adv", "advantages", ("advantages",))])
ROWS, ROW_IDS = (2, 0, 3), (5, 1, 1)


def command(made, instance=None, step=0, **more):
    settings = {"rows": ROWS, "row_ids": ROW_IDS, "seed": 7, "run_dir": Path(), "tokenizers": alone()} | more
    return CallCommand(step, made, instance, **settings)


def generate(rank, step=0, **more):
    made = more.pop("made", GENERATE)
    return rank.generate(command(made, SAMPLER, step, reads=0, sampling=SamplingSettings(100), **more))


def run_step(rank, step=0):
    """generate, values, advantages, train: the reports by name."""
    held = step
    return {
        "generate": rank.generate(command(GENERATE, SAMPLER, step, reads=held, sampling=SamplingSettings(100))),
        "infer": rank.inference(command(VALUES, TRAINED, step, reads=held, output="values", micro_batches=3)),
        "compute": rank.compute(command(COMPUTE, None, step, function=count_steps)),
        "train": rank.train_step(train_command(step)),
    }


def train_command(step, loss=mean_loss, rows=ROWS, row_ids=ROW_IDS, **more):
    one = PassCommand(TRAIN, (LossTerm(loss, ("logprobs",)),), rows, row_ids, **more)
    return command(TRAIN, TRAINED, step, train=TrainSettings(), reads=step, writes=step + 1, passes=(one,))


def engine_of(rank, instance):
    return rank.models[instance].engine


def test_generate_keeps_prompt_and_response(rank):
    """A row's tokens are its own prompt and response, wherever it stands in the batch."""
    report = generate(rank)
    keys = ("tokens", "prompt_length", "logprobs", "truncated")
    assert rank.store.keys(0) == tuple(("generate", key) for key in keys)
    tokens = rank.store.get(0, "generate", "tokens", ROWS)
    assert [row.tolist() for row in tokens] == [[5] * 12, [1] * 4, [1] * 4]
    assert [int(row) for row in rank.store.get(0, "generate", "prompt_length", ROWS)] == [6, 2, 2]
    assert [len(row) for row in rank.store.get(0, "generate", "logprobs", ROWS)] == [6, 2, 2]
    assert tokens[0].dtype == torch.int64
    assert report.num_tokens == 10


def test_seeds_identify_a_row(rank):
    """The seed depends on run seed, step, dataset row, sample and stream, and not on the row's place or company."""
    seeds = {}
    for key, settings in {
        "base": {},
        "alone": {"rows": (0,), "row_ids": (1,)},
        "next step": {"step": 1},
        "other run": {"seed": 8},
        "two samples": {"rows": (0, 1), "row_ids": (1, 1), "made": TWO_SAMPLES},
    }.items():
        generate(rank, **settings)
        seeds[key] = engine_of(rank, SAMPLER).seen["seeds"]
    assert seeds["alone"] == [seeds["base"][1]]
    assert seeds["base"][1] == seeds["base"][2]
    assert seeds["two samples"][0] == seeds["base"][1] != seeds["two samples"][1]
    assert len({seeds[key][0] for key in ("base", "next step", "other run")}) == 3
    assert all(0 <= seed < 2**63 for row in seeds.values() for seed in row)


def test_a_step_flows_from_call_to_call(rank):
    """Each call reads what the others kept; a computation sees its ports in order, a loss its columns by name."""
    reports = run_step(rank)
    assert engine_of(rank, TRAINED).seen["micro_batches"] == 3
    values = rank.store.get(0, "infer", "values", ROWS)
    assert [row.tolist() for row in values] == [[-1.0] * 6, [-1.0] * 2, [-1.0] * 2]
    advantages = rank.store.get(0, "advantages", "advantages", ROWS)
    assert [len(row) for row in advantages] == [6, 2, 2]
    assert [row.tolist() for row in rank.store.get(0, "advantages", "length", ROWS)] == [6.0, 2.0, 2.0]
    batch = engine_of(rank, TRAINED).seen["batch"]
    assert batch["mask"].tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert batch["advantages"].shape == batch["adv.advantages"].shape == batch["rollout.logprobs"].shape == (3, 6)
    assert reports["train"].metrics == {"loss": 0.0, "grad_norm": 1.0}
    assert reports["train"].num_tokens == 20
    assert reports["compute"].metrics == {"step": 0, "calls": 1, "rows": 3}


def test_a_stateful_computation_remembers(rank):
    """State returned at one step is handed in at the next."""
    run_step(rank)
    generate(rank, step=1)
    rank.inference(command(VALUES, TRAINED, 1, reads=1, output="values"))
    assert rank.compute(command(COMPUTE, None, 1, function=count_steps)).metrics["calls"] == 2


def test_rows_of_a_dataset_need_no_producer(rank):
    """An inference on preference rows reads them itself."""
    on_pairs = call("score", "inference", [("pairs", "pairs", ("tokens", "prompt_length"))], ("scores",))
    rank.inference(command(on_pairs, TRAINED, reads=0, output="scores"))
    assert [float(row) for row in rank.store.get(0, "score", "scores", ROWS)] == [3.0, 3.0, 3.0]


def test_a_rank_without_rows_takes_part(rank):
    """It generates, infers and trains on nothing: no columns, no tokens, and a version as the others have."""
    none = {"rows": (), "row_ids": ()}
    assert generate(rank, **none).row_lengths == ()
    rank.inference(command(VALUES, TRAINED, reads=0, output="values", **none))
    report = rank.train_step(train_command(0, no_loss_here, **none))
    assert engine_of(rank, TRAINED).seen["batch"] == {}
    assert (report.num_tokens, len(rank.store)) == (0, 0) and report.digest


def test_rows_are_freed_after_the_command_that_uses_them_last(rank):
    """A command uses what it frees; what it makes and nobody here uses is never kept; others stay."""
    unused = (("generate", "logprobs"), ("generate", "truncated"))
    generate(rank, frees=unused)
    assert rank.store.keys(0) == (("generate", "tokens"), ("generate", "prompt_length"))
    generate(rank, step=1, frees=unused[1:])
    last = {"reads": 0, "output": "values", "frees": tuple(("generate", key) for key in ROLLOUT)}
    report = rank.inference(command(VALUES, TRAINED, **last))
    assert rank.store.keys(0) == (("infer", "values"),)
    assert rank.store.keys(1) == tuple(("generate", key) for key in ROLLOUT)
    assert report.store_bytes == rank.store.num_bytes > 0


def test_a_generate_tells_how_long_its_rows_became(rank):
    """Prompt and response of each of its rows, in the order of the rows."""
    assert generate(rank).row_lengths == (12, 4, 4)


def test_a_stage_reads_only_the_keys_that_it_uses(rank):
    """With the lengths told, a stage that embeds nothing and has no output runs without any rows in its store."""
    rank.inference(command(VALUES, TRAINED, reads=0, output="values", keys=frozenset(), lengths=(12, 4, 4)))
    rank.train_step(train_command(0, no_loss_here, keys=frozenset(), lengths=(12, 4, 4)))
    assert engine_of(rank, TRAINED).seen["batch"] == {}
    with pytest.raises(RowsMissing, match="generate.prompt_length of step 0"):
        rank.inference(command(VALUES, TRAINED, reads=1, keys=frozenset({"prompt_length"}), lengths=(12, 4, 4)))


def test_missing_rows_are_told(rank):
    """A call whose rows were not brought here says which."""
    with pytest.raises(RowsMissing, match="generate.tokens of step 0: row 2 is not on this rank, which holds nothing"):
        rank.inference(command(VALUES, TRAINED, reads=0))


def test_an_instance_that_was_not_built_is_told(rank):
    """A command for another instance names it and the call."""
    other = replace(SAMPLER, strategy=Strategy(tp=2))
    with pytest.raises(RlhfError, match=r"generate · step 0: actor.vllm n0:0 tp2 was not built on this rank"):
        rank.generate(command(GENERATE, other, reads=0, sampling=SamplingSettings(1)))


def test_an_engine_that_holds_something_else_is_refused():
    """An engine whose shards are not those of its layout is not used."""
    layout = Layout(SHAPES, LAYOUT.regions | {"norm": {0: ((0, 4),)}})
    with pytest.raises(EngineFailed, match=r"holds \(\(0, 8\),\) of norm, its layout says \(\(0, 4\),\)"):
        Rank(0, 1, FakeEngine).build(BuildCommand(SPEC, TRAINED, (0,), layout, 64, 8))


def test_an_engine_in_another_number_format_is_refused():
    """Where it is built, before any weights move: they are never converted on their way."""
    spec = replace(SPEC, dtype="bfloat16")
    with pytest.raises(EngineFailed, match=r"holds \w+ as torch.float32, its model says bfloat16"):
        Rank(0, 1, FakeEngine).build(BuildCommand(spec, TRAINED, (0,), LAYOUT, 64, 8))


def test_a_call_that_names_another_version_is_stopped(rank):
    """After a train_step the sampler still holds the old version: a generate that wants the new one names both."""
    run_step(rank)
    with pytest.raises(
        StaleWeights, match=r"generate · step 1: actor.vllm n0:0 dp1 holds weights v0, its edge names v1"
    ):
        rank.generate(command(GENERATE, SAMPLER, 1, reads=1, sampling=SamplingSettings(1)))
    with pytest.raises(
        StaleWeights, match=r"train · step 0: actor.megatron n0:0 dp1 holds weights v1, its edge names v0"
    ):
        rank.train_step(train_command(0))


def test_weights_written_behind_the_label_are_noticed(rank):
    """A parameter that changed without a new version stops the next call, by name."""
    engine_of(rank, SAMPLER).tensors["norm"] *= 1.01
    with pytest.raises(StaleWeights, match=r"is labelled v0, but norm was written since"):
        generate(rank)


def test_reallocated_weights_are_the_version(rank):
    """reallocate labels the target; its fingerprint is the version's, and its engine is told."""
    known = Fingerprints()
    trained = run_step(rank)["train"]
    known.settle(TRAINED, ACTOR, 1, {0: trained.digest}, LAYOUT)
    report = rank.reallocate(MoveWeightsCommand(TRAINED, SAMPLER, 1, LAYOUT, LAYOUT))
    known.settle(SAMPLER, ACTOR, 1, {0: report.digest}, LAYOUT)
    assert engine_of(rank, SAMPLER).seen["written"]
    assert report.bytes_moved == 0  # all of it stays on the rank
    rank.generate(command(GENERATE, SAMPLER, 1, reads=1, sampling=SamplingSettings(100)))
    assert float(rank.store.get(1, "generate", "logprobs", [2])[0][0]) == -2.0


def test_a_stale_source_is_not_moved(rank):
    """reallocate of a version that the source does not hold is stopped too."""
    with pytest.raises(StaleWeights, match="holds weights v0, its edge names v4"):
        rank.reallocate(MoveWeightsCommand(TRAINED, SAMPLER, 4, LAYOUT, LAYOUT))


def test_a_planted_stale_weight_is_called_by_its_version(rank):
    """Old content under a new label: the controller names the version expected and the one it is."""
    known = Fingerprints()
    old = engine_of(rank, TRAINED).tensors["embed"].clone()
    known.settle(TRAINED, ACTOR, 0, {0: rank.models[TRAINED].digest()}, LAYOUT)
    known.settle(TRAINED, ACTOR, 1, {0: run_step(rank)["train"].digest}, LAYOUT)
    rank.reallocate(MoveWeightsCommand(TRAINED, SAMPLER, 1, LAYOUT, LAYOUT))
    engine_of(rank, SAMPLER).tensors["embed"].copy_(old)
    with pytest.raises(StaleWeights, match=r"actor.vllm n0:0 dp1 holds the content of v0, expected v1"):
        known.settle(SAMPLER, ACTOR, 1, {0: rank.models[SAMPLER].digest()}, LAYOUT)


def test_offloaded_weights_serve_no_call(rank):
    """Offload frees device bytes; a call before the reload is stopped; reload hashes the weights again."""
    before = rank.models[TRAINED].engine.device_bytes()
    assert rank.offload(TRAINED).bytes_moved == 100
    assert rank.models[TRAINED].engine.device_bytes() == 0 < before
    generate(rank)
    with pytest.raises(StaleWeights, match=r"infer · step 0: actor.megatron n0:0 dp1 is offloaded"):
        rank.inference(command(VALUES, TRAINED, reads=0))
    assert rank.reload(TRAINED).digest == rank.models[SAMPLER].digest()
    rank.inference(command(VALUES, TRAINED, reads=0, output="values"))


def test_offloaded_weights_are_not_written(rank):
    """Their device memory may be another instance's, and a write to it would stop the process."""
    rank.offload(SAMPLER)
    with pytest.raises(StaleWeights, match=r"to actor.vllm n0:0 dp1: actor.vllm n0:0 dp1 is offloaded; reload it"):
        rank.reallocate(MoveWeightsCommand(TRAINED, SAMPLER, 0, LAYOUT, LAYOUT))


def test_weights_that_were_dropped_serve_no_call_until_others_are_written(rank):
    """Neither a call nor a move uses them; a reallocation labels them."""
    engine = engine_of(rank, SAMPLER)
    engine.offload, engine.reload = (lambda part, copies: 0), (lambda part, copies: 0)
    rank.offload(SAMPLER, copies=False)
    assert rank.reload(SAMPLER, copies=False).digest is None
    with pytest.raises(StaleWeights, match=r"actor.vllm n0:0 dp1 was reloaded without weights"):
        generate(rank)
    with pytest.raises(StaleWeights, match=r"actor.vllm n0:0 dp1 was reloaded without weights"):
        rank.export(SAMPLER, Path("out"), "tokenizer", LAYOUT)
    rank.reallocate(MoveWeightsCommand(TRAINED, SAMPLER, 0, LAYOUT, LAYOUT))
    generate(rank)


def test_without_its_optimizer_an_instance_infers_and_is_copied_but_does_not_train(rank):
    """The weights stay, so nothing but a train_step asks for what is away, and the reload hashes no weights."""
    rank.offload(TRAINED, "optimizer")
    generate(rank)
    rank.inference(command(VALUES, TRAINED, reads=0, output="values"))
    rank.compute(command(COMPUTE, None, function=count_steps))
    rank.reallocate(MoveWeightsCommand(TRAINED, SAMPLER, 0, LAYOUT, LAYOUT))
    with pytest.raises(StaleWeights, match=r"train · step 0: the optimizer of actor.megatron n0:0 dp1 is offloaded"):
        rank.train_step(train_command(0))
    assert rank.reload(TRAINED, "optimizer").digest is None
    rank.train_step(train_command(0))
    assert engine_of(rank, TRAINED).moved == [("offload", "optimizer"), ("reload", "optimizer")]


def test_reports_count(rank):
    """A report has its own seconds, those spent on fingerprints once, and the rank's device bytes."""
    reports = run_step(rank)
    assert all(report.seconds >= report.fingerprint_seconds >= 0 for report in reports.values())
    assert reports["train"].fingerprint_seconds > 0 == reports["compute"].fingerprint_seconds
    assert reports["train"].device_bytes == 2 * (64 * 8 + 8) * 4
    assert reports["train"].resident_bytes > 1 << 20
