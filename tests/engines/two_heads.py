"""A trunk with both heads, what ranks do with it, and the same by transformers and plain PyTorch."""

from pathlib import Path

import torch
from megatron_cases import Case, held, make_folder, make_rows, oracle_outputs, part, replica_rows
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prefect_rlhf.engines.engine import TrainingRows, TrainSettings
from prefect_rlhf.engines.losses.protocol import LossTerm
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.files.model_folder import APART
from prefect_rlhf.placement.models.model import OptimizerSpec
from prefect_rlhf.tasks.rl.losses import ppo_clip, value_clip
from prefect_rlhf.tasks.rl.settings.online import PPO

GRADIENT = OptimizerSpec(lr=1.0, eps=1.0, max_grad_norm=1e9)
"""A step that tells the gradient: AdamW's first one changes a weight by g / (|g| + 1)."""
ALGO, WEIGHT, TEMPERATURE = PPO(clip=0.1, value_clip=0.05), 0.3, 0.8
NAMES = ("ppo_clip", "value_clip")


def make_two_heads(path: Path, **shape) -> str:
    """A random Llama with a random scalar head beside the other."""
    folder = make_folder(path, **shape)
    hidden = shape.get("hidden", 128)
    weight = torch.randn(1, hidden, generator=torch.Generator().manual_seed(7)) / hidden
    save_file({"score.weight": weight}, path / APART)
    return folder


def two_heads_rows() -> tuple:
    """Rows with an old policy, old values, returns and advantages."""
    sequences, batch = make_rows(24)
    generator, mask = torch.Generator().manual_seed(3), batch["mask"]
    names = ("logprobs", "values", "returns")
    old = {name: torch.randn(mask.shape, generator=generator) * mask for name in names}
    far = {"logprobs": old["logprobs"] / 4 - 3, "values": old["values"] / 10, "advantages": 10 * batch["advantages"]}
    return sequences, batch | old | far


def terms(names: tuple[str, ...] = NAMES) -> tuple[LossTerm, ...]:
    both = (
        LossTerm(ppo_clip(ALGO), ("logprobs",), "ppo_clip", temperature=TEMPERATURE),
        LossTerm(value_clip(ALGO), ("values",), "value_clip", weight=WEIGHT, mean_over="rows"),
    )
    return tuple(term for term in both if term.name in names)


def train_both(rank: int, case: Case, micro_batches: int, names: tuple[str, ...] = NAMES):
    """Metrics and weights of one step on the policy's loss and the values', on the same rows."""
    engine = case.build(rank)
    return step(engine, rank, case, micro_batches, names), held(engine)


def kept_bytes(rank: int, case: Case) -> int:
    """Bytes of weights, gradients and moments after a step."""
    engine = case.build(rank)
    step(engine, rank, case, 1, NAMES)
    return engine.device_bytes()


def step(engine: MegatronEngine, rank: int, case: Case, micro_batches: int, names: tuple[str, ...]) -> dict[str, float]:
    """Metrics of a step of a replica on its part of the rows."""
    sequences, batch = two_heads_rows()
    rows = part(sequences, batch, replica_rows(24, case.dp, 1)[case.replica(rank)])
    made = terms(names)
    return engine.train([TrainingRows(rows[0], made, (rows[1],) * len(made), 1)], TrainSettings(1, micro_batches))


class PlainTwoHeads(torch.nn.Module):
    """transformers' model with a linear layer beside its own."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model, self.lm_head = self.lm.model, self.lm.lm_head
        self.score = torch.nn.Linear(self.lm.config.hidden_size, 1, bias=False)
        self.score.weight.data = load_file(Path(folder) / APART)["score.weight"]

    def parameters_by_name(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.lm.named_parameters()) | {"score.weight": self.score.weight}


def plain_loss(model: PlainTwoHeads, names: tuple[str, ...] = NAMES) -> torch.Tensor:
    """Schulman et al. 2017, equation 7, as a mean over tokens, and half the worse squared error as one over rows."""
    sequences, batch = two_heads_rows()
    mask = batch["mask"]
    logprobs = oracle_outputs(model, sequences, "lm", TEMPERATURE)
    ratio = torch.exp((logprobs - batch["logprobs"]) * mask)
    gain = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.9, 1.1) * batch["advantages"])
    policy = -(gain * mask).sum() / mask.sum()
    values, old, wanted = oracle_outputs(model, sequences, "scalar"), batch["values"], batch["returns"]
    near = old + (values - old).clamp(-0.05, 0.05)
    worst = torch.maximum((values - wanted) ** 2, (near - wanted) ** 2) * mask
    error = (0.5 * worst.sum(1) / mask.sum(1)).mean()
    return (policy if "ppo_clip" in names else 0) + (WEIGHT * error if "value_clip" in names else 0)
