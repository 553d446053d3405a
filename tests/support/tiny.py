"""A whole run in miniature: a language model, a reward model and data that fit in a test."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.tasks.small_tokenizer import WORDS, save_letter_tokenizer, save_small_tokenizer


def make_model(
    folder: Path,
    *,
    scalar: bool = False,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 64,
    heads: int = 2,
    family: str = "llama",
    kv_heads: int | None = None,
    context: int = 64,
) -> str:
    """A random model with heads of 32, with the small tokenizer."""
    torch.manual_seed(layers + hidden)
    config = AutoConfig.for_model(
        family, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads, head_dim=32, vocab_size=vocab, max_position_embeddings=context,
        num_labels=1, tie_word_embeddings=True, initializer_range=0.15, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    kind.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return save_letter_tokenizer(folder) if family == "qwen2" else save_small_tokenizer(folder)


def make_prompts(file: Path, num_train: int = 16, num_held_out: int = 4) -> str:
    """Prompts of two or three of the small tokenizer's words."""
    words = WORDS[3:]
    rows = [" ".join(words[(i * k) % len(words)] for k in range(1, 3 + i % 2)) for i in range(num_train + num_held_out)]
    splits = ["train"] * num_train + ["held_out"] * num_held_out
    pq.write_table(pa.table({"prompt": rows, "split": splits}), file)
    return str(file)


def make_pairs(file: Path, num_train: int = 8, num_held_out: int = 4) -> str:
    """Pairs in which the chosen answer is good."""
    number = num_train + num_held_out
    columns = {
        "prompt": ["what is it"] * number,
        "chosen": ["the best film"] * number,
        "rejected": ["a bad film"] * number,
        "split": ["train"] * num_train + ["held_out"] * num_held_out,
    }
    pq.write_table(pa.table(columns), file)
    return str(file)


def ppo_parameters(folder: Path) -> dict:
    """Parameters of a PPO run of tiny models, written into `folder`; the critic's shape is not the actor's."""
    actor = make_model(folder / "actor")
    reward = make_model(folder / "reward", scalar=True, layers=3)
    prompts = make_prompts(folder / "prompts.parquet")
    return {
        "prompts": {"path": prompts},
        "held_out": {"path": prompts, "split": "held_out"},
        "actor": {"path": actor},
        "ref": {"path": actor},
        "critic": {"path": reward, "head": "scalar"},
        "reward": {"path": reward, "head": "scalar"},
        "algo": {"batch_size": 8, "sampling": {"max_new_tokens": 5}, "evaluate_every": 2},
        "output_dir": str(folder / "runs"),
        "steps": 2,
    }
