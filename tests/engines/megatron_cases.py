"""Tiny random Llamas, rows, a loss and what ranks do with them; transformers and plain PyTorch as the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import LossTerms, Sequences, TrainSettings
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.engines.megatron.groups import build_groups
from prefect_rlhf.engines.megatron.head import token_logprobs
from prefect_rlhf.engines.megatron.model import head_weight
from prefect_rlhf.engines.megatron.packing import Packing
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.mesh import DeviceMesh
from prefect_rlhf.placement.model import OptimizerSpec
from prefect_rlhf.placement.plan import ModelInstance, Offload
from prefect_rlhf.placement.strategy import Strategy

VOCAB = 480  # divides by 2 and 3
OPTIMIZER = OptimizerSpec(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2, head_lr=3e-2)


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


def loss(output: torch.Tensor, batch: dict) -> LossTerms:
    """Not linear in the output, so that a wrong normalization shows."""
    mask = batch["mask"]
    return LossTerms(
        -((output + 0.01 * output**2) * batch["advantages"] * mask).sum(), mask.sum(), {"mean": (output * mask).sum()}
    )


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

    def spec(self):
        options = {"dtype": self.dtype, "optimizer": self.optimizer, "new_head": self.new_head}
        return read_model_spec("actor", self.folder, self.head, **options)

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
    return None if found is None else found.numpy()


def logits(rank: int, case: Case):
    """This rank's slice of the logits [B, S, V / tp] on the last stage of a pipeline of one."""
    engine = case.build(rank)
    tokens = make_rows(8)[0].tokens_BS
    padded = Packing.of(torch.full((8,), tokens.shape[1]), tokens.shape[1])
    hidden = engine._model(tokens, padded)
    return (hidden @ head_weight(engine._model).t()).transpose(0, 1).detach().numpy()


def train_dealt_unevenly(rank: int, case: Case, settings: TrainSettings, first: tuple[int, ...]):
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
    metrics = engine.train(*part(*make_rows(24), torch.cat(hands)), loss, settings)
    return metrics, held(engine)


def infer_one_row(rank: int, case: Case, output: str):
    """Outputs of the first replica's one row; the others have none."""
    rows = torch.arange(1)[case.replica(rank) :]
    found = case.build(rank).infer(part(*make_rows(8), rows)[0], output, 2, 1.0)
    return None if found is None else found.numpy()


def train(rank: int, case: Case, settings: TrainSettings, offload: Offload = "none"):
    """Metrics of one train call, and this rank's weights afterwards."""
    engine = case.build(rank)
    sequences, batch = make_rows(24)
    rows = replica_rows(24, case.dp, settings.mini_batches)[case.replica(rank)]
    if offload != "none":
        engine.train(*part(sequences, batch, rows), loss, settings)
        engine.offload(offload)
        engine.reload(offload)
    metrics = engine.train(*part(sequences, batch, rows), loss, settings)
    return metrics, held(engine)


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


def load(rank: int, case: Case):
    """This rank's weights as loaded."""
    return held(case.build(rank))


def held(engine: MegatronEngine) -> dict[str, tuple]:
    """Region and values of every shard."""
    return {
        name: (shard.region, shard.view.reshape(shard.shape).float().numpy().copy())
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
    """Log-probabilities or values [B, T] by transformers, of rows padded on the right."""
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
    return distribution.gather(-1, targets[..., None])[..., 0] * mask


def plain_training(model: torch.nn.Module, head: str, settings: TrainSettings, spec: OptimizerSpec) -> list[float]:
    """Train a transformers model on the same rows with torch alone; return the gradients' norms."""
    groups = [
        {"params": [p], "lr": _rate(n, spec), "weight_decay": _decay(p, spec)} for n, p in model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, betas=spec.betas, eps=spec.eps)
    base, norms = [group["lr"] for group in groups], []
    sequences, batch = make_rows(24)
    for step, rows in enumerate(torch.arange(24).chunk(settings.mini_batches) * settings.epochs):
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / max(1, spec.warmup_steps))
        chosen, columns = part(sequences, batch, rows)
        terms = loss(oracle_outputs(model, chosen, head, settings.temperature), columns)
        optimizer.zero_grad()
        (terms.total / terms.weight).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), spec.max_grad_norm)))
        optimizer.step()
    return norms


def _rate(name: str, spec: OptimizerSpec) -> float:
    return spec.head_lr if name == "score.weight" and spec.head_lr else spec.lr


def _decay(parameter: torch.nn.Parameter, spec: OptimizerSpec) -> float:
    return spec.weight_decay if parameter.dim() > 1 else 0.0
