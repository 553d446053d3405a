"""A tiny model whose weights follow from a formula, so that what another program recorded of it stays true."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.tasks.small_tokenizer import save_small_tokenizer


def numbers(seed: float, shape: torch.Size) -> Tensor:
    """Numbers from -0.5 to 0.5 that look random, in float64: the fraction of a large multiple of a sine."""
    places = torch.arange(shape.numel(), dtype=torch.float64)
    return ((places * 12.9898 + seed * 78.233).sin() * 43758.5453).remainder(1).sub(0.5).view(shape)


def make_formula_model(folder: Path, family: str, *, scalar: bool = False) -> str:
    """A model of two layers with heads of 16, with the small tokenizer; it pads with `<unk>`, which no text has."""
    config = AutoConfig.for_model(
        family, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, vocab_size=16, max_position_embeddings=64, num_labels=1, tie_word_embeddings=not scalar,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for seed, (_, values) in enumerate(sorted(model.named_parameters())):
            norm = values.dim() == 1
            values.copy_(norm + (0.2 if norm else 0.5) * numbers(seed, values.shape))
    model.save_pretrained(folder)
    return save_small_tokenizer(folder)


def make_formula_adapter(folder: Path, model: str, options: Mapping[str, Any]) -> str:
    """An adapter of a model for the options of TRL's, as peft writes it; B is zero, as in a new adapter."""
    matrices, rank = options["lora_target_modules"], options["lora_r"]
    config = LoraConfig(r=rank, lora_alpha=options["lora_alpha"], target_modules=matrices, task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    with torch.no_grad():
        for seed, (name, values) in enumerate(sorted(adapted.named_parameters())):
            if "lora_A" in name:
                values.copy_(numbers(seed, values.shape))
    adapted.save_pretrained(folder)
    return str(folder)


def change(name: str, before: Tensor, after: Tensor) -> float:
    """Project a parameter's change on a fixed direction: two different changes give two different numbers."""
    direction = numbers(1 + sum(name.encode()), before.shape).sign()
    return float(((after.double().view(before.shape) - before.double()) * direction).sum() / before.numel() ** 0.5)
