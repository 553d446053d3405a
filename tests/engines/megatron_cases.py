"""Tiny random Llamas, rows, a loss and what ranks do with them; transformers and plain PyTorch as the oracle."""

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import Sequences, TrainingRows, TrainSettings
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.losses.protocol import LossTerm, LossValues
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.engines.megatron.groups import build_groups
from prefect_rlhf.engines.megatron.packing import Packing
from prefect_rlhf.engines.megatron.vocabulary.entropy import token_entropy
from prefect_rlhf.engines.megatron.vocabulary.head import token_logprobs
from prefect_rlhf.engines.weights.memory import storage_bytes
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.model import BaseDtype, OptimizerSpec
from prefect_rlhf.placement.plan import ModelInstance, Offload, Recompute

VOCAB = 480  # divides by 2 and 3
OPTIMIZER = OptimizerSpec(
    lr=1e-2,
    eps=1e-3,
    weight_decay=0.1,
    max_grad_norm=0.5,
    warmup_steps=2,
    head_lr=3e-2,
    schedule="linear",
    decay_steps=9,
)


def make_folder(path: Path, *, tied=True, scalar=False, layers=4, hidden=128, kv_heads=2, heads=4, vocab=VOCAB) -> str:
    """Write a random Llama, weights of standard deviation 0.15 so that logits are far apart."""
    torch.manual_seed(layers + hidden)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=32, vocab_size=vocab, max_position_embeddings=128, num_labels=1,
        tie_word_embeddings=tied, initializer_range=0.15, rope_theta=1e5, pad_token_id=0,
    )  # fmt: skip
    model = (LlamaForSequenceClassification if scalar else LlamaForCausalLM)(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # all ones would hide a missing or exchanged norm
    model.save_pretrained(path)
    return str(path)


def make_rows(num_rows: int, seed: int = 0) -> tuple[Sequences, dict[str, torch.Tensor]]:
    """Rows of different prompt and response lengths, and an advantage per response token."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, 6, (num_rows,), generator=generator)
    lengths = prompts + torch.randint(1, 9, (num_rows,), generator=generator)
    tokens = torch.randint(1, VOCAB, (num_rows, int(lengths.max())), generator=generator)
    tokens[torch.arange(tokens.shape[1])[None] >= lengths[:, None]] = 0
    sequences = Sequences(tokens, prompts, lengths)
    mask = sequences.response_mask_BT()
    return sequences, {"mask": mask, "advantages": torch.randn(mask.shape, generator=generator) * mask}


def part(sequences: Sequences, batch: dict, rows: torch.Tensor) -> tuple[Sequences, dict]:
    """Some rows, padded no further than they need, as a replica gets them: without rows no columns either."""
    if not len(rows):
        return Sequences(torch.zeros(0, 1).long(), rows, rows), {}
    length, prompts = sequences.lengths_B[rows], sequences.prompt_lengths_B[rows]
    picked = Sequences(sequences.tokens_BS[rows, : int(length.max())], prompts, length)
    return picked, {key: column[rows, : picked.num_response_tokens] for key, column in batch.items()}


def replica_rows(num_rows: int, dp: int, mini_batches: int) -> list[torch.Tensor]:
    """The rows of each replica: its equal part of every mini-batch."""
    parts = torch.arange(num_rows).view(mini_batches, dp, -1)
    return [parts[:, d].flatten() for d in range(dp)]


def loss(output: torch.Tensor, batch: dict) -> LossValues:
    """Not linear in the output, so that a wrong normalization shows."""
    return LossValues(-(output + 0.01 * output**2) * batch["advantages"], {"mean": output})


@dataclass(frozen=True)
class Walk:
    """A train_step with one loss on one row set."""

    output: str
    mini_batches: int = 1
    micro_batches: int = 1
    epochs: int = 1
    temperature: float = 1.0
    rows_per_item: int = 1
    mini_batch_rows: tuple[int, ...] = ()
    some_without_rows: bool = False
    recompute: Recompute = 0
    tokens_over_tp: bool = False


def train_on(engine: MegatronEngine, sequences: Sequences, batch: dict, function, walk: Walk) -> dict[str, float]:
    """Train an engine on rows; returns the metrics."""
    over = "rows" if walk.rows_per_item > 1 else "tokens"
    term = LossTerm(function, (walk.output,), mean_over=over, temperature=walk.temperature)
    dealt = walk.mini_batch_rows, walk.some_without_rows
    rows = TrainingRows(sequences, (term,), (batch,), walk.rows_per_item, *dealt)
    again = walk.recompute, walk.tokens_over_tp
    return engine.train([rows], TrainSettings(walk.mini_batches, walk.micro_batches, walk.epochs, *again))


@dataclass(frozen=True)
class Case:
    """A model on ranks under a strategy."""

    folder: str
    ranks: tuple[int, ...] = (0,)
    dp: int = 1
    tp: int = 1
    pp: int = 1
    head: str = "lm"
    dtype: str = "float32"
    optimizer: OptimizerSpec | None = None
    new_head: bool = False
    adapter: AdapterSpec | None = None
    base_dtype: BaseDtype | None = None

    def spec(self):
        options = {"dtype": self.dtype, "optimizer": self.optimizer, "new_head": self.new_head}
        spec = read_model_spec("actor", self.folder, self.head, **options)
        return replace(spec, adapter=self.adapter, base_dtype=self.base_dtype)

    def build(self, rank: int) -> MegatronEngine:
        strategy = Strategy(self.dp, self.tp, self.pp)
        instance = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, 1), strategy)
        return MegatronEngine(BuildCommand(self.spec(), instance, self.ranks, Layout({}, {}), 128, 64), rank)

    def replica(self, rank: int) -> int:
        return Strategy(self.dp, self.tp, self.pp).coordinates()[self.ranks.index(rank)].dp

    def with_optimizer(self, **changes):
        return replace(self, optimizer=replace(OPTIMIZER, **changes))


def infer(rank: int, case: Case, output: str, micro_batches: int, temperature: float):
    """This rank's output of its replica's rows."""
    sequences, batch = make_rows(8)
    rows = replica_rows(8, case.dp, 1)[case.replica(rank)]
    found = case.build(rank).infer(part(sequences, batch, rows)[0], output, micro_batches, temperature)
    return None if found is None else found.cpu().numpy()


def logits(rank: int, case: Case):
    """This rank's slice of the logits [B, S, V / tp] on the last stage of a pipeline of one."""
    engine = case.build(rank)
    tokens = make_rows(8)[0].tokens_BS
    padded = Packing.of(torch.full((8,), tokens.shape[1]), tokens.shape[1])
    hidden = engine._model(tokens, padded)
    return (hidden @ engine._model.head_weight("lm").t()).transpose(0, 1).detach().numpy()


def train_dealt_unevenly(rank: int, case: Case, settings: Walk, first: tuple[int, ...]):
    """As `train` on two replicas, the first of which has so many rows of each mini-batch and the other the rest."""
    chunks = torch.arange(24).chunk(settings.mini_batches)
    cuts = [(chunk[:count], chunk[count:]) for chunk, count in zip(chunks, first, strict=True)]
    hands = [cut[case.replica(rank)] for cut in cuts]
    engine = case.build(rank)
    settings = replace(
        settings,
        mini_batch_rows=tuple(map(len, hands)),
        some_without_rows=any(not len(rows) for cut in cuts for rows in cut),
    )
    metrics = train_on(engine, *part(*make_rows(24), torch.cat(hands)), loss, settings)
    return metrics, held(engine)


def infer_one_row(rank: int, case: Case, output: str):
    """Outputs of the first replica's one row; the others have none."""
    rows = torch.arange(1)[case.replica(rank) :]
    found = case.build(rank).infer(part(*make_rows(8), rows)[0], output, 2, 1.0)
    return None if found is None else found.cpu().numpy()


def train(rank: int, case: Case, settings: Walk, offload: Offload = "none"):
    """Metrics of one train call, and this rank's weights afterwards."""
    engine = case.build(rank)
    sequences, batch = make_rows(24)
    rows = replica_rows(24, case.dp, settings.mini_batches)[case.replica(rank)]
    if offload != "none":
        train_on(engine, *part(sequences, batch, rows), loss, settings)
        engine.offload(offload)
        engine.reload(offload)
    metrics = train_on(engine, *part(sequences, batch, rows), loss, settings)
    return metrics, held(engine)


def train_by_parts(rank: int, case: Case, settings: Walk):
    """`train` twice with all of the model in host memory between its uses, as the nodes of a plan have it.

    The optimizer comes for each train_step alone, and goes first. The weights come once more between, unchanged, for an
    inference. Also returns, by part, the bytes that the engine says have left, and those that have left the process:
    the storages of all tensors, copies on the host apart.
    """
    engine = case.build(rank)
    sequences, batch = make_rows(24)
    rows = part(sequences, batch, replica_rows(24, case.dp, settings.mini_batches)[case.replica(rank)])
    train_on(engine, *rows, loss, settings)
    left = {}
    for what in ("optimizer", "weights"):
        before = engine.device_bytes(), _living_bytes()
        copied = engine.offload(what)
        left[what] = before[0] - engine.device_bytes(), before[1] - _living_bytes() + copied
    assert engine.device_bytes() == 0
    engine.reload("weights")
    engine.infer(rows[0], "logprobs", 1, 1.0)
    engine.offload("weights", copies=False)
    engine.reload("weights")
    engine.reload("optimizer")
    return train_on(engine, *rows, loss, settings), held(engine), left


def _living_bytes() -> int:
    """Bytes of the storages of all tensors of this process."""
    gc.collect()
    return storage_bytes(each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))


def split_logprobs(rank: int, vocab: int, ranks: tuple[int, ...]):
    """Log-probabilities of every token under a vocabulary split over `ranks`, the last of which may have none of it."""
    groups = build_groups(ranks, Strategy(tp=len(ranks)), rank)
    generator = torch.Generator().manual_seed(0)
    hidden, whole = torch.randn(vocab, 8, generator=generator), torch.randn(vocab, 8, generator=generator)
    part = -(-vocab // len(ranks))
    start, stop = (min(vocab, index * part) for index in (groups.coordinate.tp, groups.coordinate.tp + 1))
    weight = torch.full((part, 8), 1e3)  # padding that would win
    weight[: stop - start] = whole[start:stop]
    weight.requires_grad_()
    found = token_logprobs(hidden, weight, torch.arange(vocab), 1.0, groups.tp, stop - start)
    found.sum().backward()
    expected = (hidden @ whole.t()).log_softmax(-1).diagonal()
    return found.detach().numpy(), expected.numpy(), weight.grad[stop - start :].abs().sum().item()


def split_entropy(rank: int, vocab: int, ranks: tuple[int, ...]):
    """Entropies and gradients under a vocabulary split over `ranks`, and those of plain torch on the whole of it."""
    groups = build_groups(ranks, Strategy(tp=len(ranks)), rank)
    generator = torch.Generator().manual_seed(0)
    hidden, whole, slope = (torch.randn(*size, generator=generator) for size in ((5, 8), (vocab, 8), (5,)))
    part = -(-vocab // len(ranks))
    start, stop = (min(vocab, index * part) for index in (groups.coordinate.tp, groups.coordinate.tp + 1))
    weight = torch.full((part, 8), 1e3)  # padding that would win
    weight[: stop - start] = whole[start:stop]
    found = token_entropy(hidden.requires_grad_(), weight.requires_grad_(), 0.7, groups.tp, stop - start)
    (found * slope).sum().backward()
    made = found.detach(), hidden.grad, weight.grad[: stop - start]
    plain_hidden, plain = hidden.detach().clone().requires_grad_(), whole.requires_grad_()
    expected = torch.distributions.Categorical(logits=plain_hidden @ plain.t() / 0.7).entropy()
    (expected * slope).sum().backward()
    wanted = expected.detach(), plain_hidden.grad, plain.grad[start:stop]
    return [float((one - other).abs().max()) if len(one) else 0.0 for one, other in zip(made, wanted, strict=True)]


def load(rank: int, case: Case):
    """This rank's weights as loaded."""
    return held(case.build(rank))


def held(engine: MegatronEngine) -> dict[str, tuple]:
    """Region and values of every shard."""
    return {
        name: (shard.region, shard.view.reshape(shard.shape).float().cpu().numpy().copy())
        for name, shard in engine.weights().items()
    }


def assemble(parts: list[dict[str, tuple]], shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Whole tensors out of the ranks' regions; nan where no rank held anything."""
    whole = {name: np.full(shape, np.nan, dtype=np.float32) for name, shape in shapes.items()}
    for shards in parts:
        for name, (region, values) in shards.items():
            whole[name][tuple(slice(*span) for span in region)] = values
    return whole


def oracle_outputs(model: torch.nn.Module, sequences: Sequences, head: str, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities, entropies or values [B, T] by transformers, of rows padded on the right."""
    mask = sequences.response_mask_BT()
    position = (sequences.prompt_lengths_B[:, None] + torch.arange(mask.shape[1])[None]).clamp(
        max=sequences.tokens_BS.shape[1] - 1
    )
    rows = torch.arange(len(sequences))[:, None]
    hidden = model.model(sequences.tokens_BS).last_hidden_state
    if head == "scalar":
        return model.score(hidden)[rows, position - 1, 0] * mask
    targets = sequences.tokens_BS[rows, position]
    distribution = (model.lm_head(hidden)[rows, position - 1] / temperature).log_softmax(-1)
    if head == "entropy":
        return -(distribution.exp() * distribution).sum(-1) * mask
    return distribution.gather(-1, targets[..., None])[..., 0] * mask


def likelier(logprobs: torch.Tensor, entropy: torch.Tensor, batch: dict) -> LossValues:
    """Of two outputs, each not linear."""
    return LossValues(logprobs**2 - 0.5 * logprobs * entropy, {"entropy": entropy})


TERMS = (
    LossTerm(loss, ("logprobs",), "first", temperature=0.8),
    LossTerm(likelier, ("logprobs", "entropy"), "second", weight=-0.3, mean_over="rows"),
    LossTerm(loss, ("logprobs",), "third", weight=0.7, mean_over=9.0),
)
"""Of a sum: the first and the third on the same rows, the second on others, of which there are fewer."""


def rows_of_terms() -> list[tuple[tuple[LossTerm, ...], Sequences, dict]]:
    """The row sets of TERMS."""
    return [((TERMS[0], TERMS[2]), *make_rows(24)), ((TERMS[1],), *make_rows(7, seed=5))]


def train_terms(rank: int, case: Case, terms: tuple[str, ...], micro_batches: int = 2):
    """Metrics and weights of one train call of three mini-batches on a sum of losses; replicas share rows unevenly."""
    engine, dealt = case.build(rank), []
    for of_rows, sequences, batch in rows_of_terms():
        kept = tuple(term for term in of_rows if term.name in terms)
        chunks = torch.arange(len(sequences)).tensor_split(3)
        hands = [
            chunk[case.replica(rank) :: case.dp] if len(chunk) > 2 else chunk[: 2 * (case.replica(rank) == 0)]
            for chunk in chunks
        ]
        sizes = tuple(map(len, hands))
        rows = part(sequences, batch, torch.cat(hands))
        columns = (rows[1],) * len(kept)
        if kept:
            dealt.append(TrainingRows(rows[0], kept, columns, 1, sizes, some_without_rows=True))
    metrics = engine.train(dealt, TrainSettings(3, micro_batches))
    return metrics, held(engine)


def plain_terms(model: torch.nn.Module, terms: tuple[str, ...], mini_batch: int) -> torch.Tensor:
    """The sum of losses of a mini-batch by plain torch, with a graph."""
    total = torch.zeros(())
    for of_rows, sequences, batch in rows_of_terms():
        rows = torch.arange(len(sequences)).tensor_split(3)[mini_batch]
        chosen, columns = part(sequences, batch, rows)
        mask = columns["mask"]
        for term in (term for term in of_rows if term.name in terms):
            outputs = [oracle_outputs(model, chosen, output, term.temperature) for output in term.outputs]
            values = term.loss(*outputs, columns).values * mask
            tokens = mask.sum(1)
            mean = {
                "first": values.sum() / tokens.sum(),
                "second": (values.sum(1) / tokens).mean(),
                "third": (values.sum(1) / 9).mean(),
            }[term.name]
            total = total + term.weight * mean
    return total


def plain_training(model: torch.nn.Module, head: str, settings: Walk, spec: OptimizerSpec) -> list[float]:
    """Train a transformers model on the same rows with torch alone; return the gradients' norms."""
    sequences, batch = make_rows(24)
    chunks = torch.arange(24).chunk(settings.mini_batches)

    def mean(mini_batch: int) -> torch.Tensor:
        chosen, columns = part(sequences, batch, chunks[mini_batch])
        made = loss(oracle_outputs(model, chosen, head, settings.temperature), columns)
        return (made.values * columns["mask"]).sum() / columns["mask"].sum()

    return plain_steps(model, mean, list(range(settings.mini_batches)) * settings.epochs, spec)


def plain_steps(model: torch.nn.Module, mean, mini_batches: list[int], spec: OptimizerSpec) -> list[float]:
    """Take a step on `mean(mini_batch)` of each; return the gradients' norms."""
    groups = [
        {"params": [p], "lr": _rate(n, spec), "weight_decay": _decay(p, spec)} for n, p in model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, betas=spec.betas, eps=spec.eps)
    base, norms = [group["lr"] for group in groups], []
    for step, mini_batch in enumerate(mini_batches):
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * min((step + 1) / max(1, spec.warmup_steps), _left(step, spec))
        optimizer.zero_grad()
        mean(mini_batch).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), spec.max_grad_norm)))
        optimizer.step()
    return norms


def _left(step: int, spec: OptimizerSpec) -> float:
    """What a linear schedule leaves of the rate in a step, counted from 0."""
    return min(1.0, (spec.decay_steps - step) / (spec.decay_steps - spec.warmup_steps))


def _rate(name: str, spec: OptimizerSpec) -> float:
    return spec.head_lr if name == "score.weight" and spec.head_lr else spec.lr


def _decay(parameter: torch.nn.Parameter, spec: OptimizerSpec) -> float:
    return spec.weight_decay if parameter.dim() > 1 else 0.0
