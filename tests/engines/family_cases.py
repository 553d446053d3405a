"""Tiny random models of every family that runs, with 6 heads, and what transformers makes of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import megatron_cases as cases
import numpy as np
import torch
from megatron_cases import Case
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from prefect_rlhf.placement.models.model import OptimizerSpec

GRADIENT = OptimizerSpec(lr=1.0, eps=1.0, max_grad_norm=1e9)
"""A step that tells the gradient: AdamW's first one changes a weight by g / (|g| + 1)."""
VOCAB = cases.VOCAB + 1  # divides by neither 2 nor 3
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # wavelengths of 16 to 64 tokens are in between
}
OPTIONS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "llama": {"tie_word_embeddings": False},
        "llama 3.1": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
        "mistral": {"sliding_window": None, "tie_word_embeddings": False},
        "qwen2": {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 4096},
        "qwen3": {"tie_word_embeddings": False},
        "gemma3_text": {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,  # of rows of up to 13 tokens
            "query_pre_attn_scalar": 48,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
                "full_attention": {"rope_type": "default", "rope_theta": 1e5},
            },
        },
    }
)
"""The families that run, by what is unlike the defaults of their config."""
LAYERS = 3  # over two stages: two and one


def make_family(path: Path, name: str, kv_heads: int, *, scalar: bool = False, seed: int = 0, **changes: Any) -> str:
    """Write a random model: weights of deviation 0.15, norms and biases that are not what they begin with."""
    torch.manual_seed(kv_heads + seed)
    options = {"model_type": name, **OPTIONS[name], **changes}
    sizes = {
        "hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": LAYERS, "num_attention_heads": 6,
        "num_key_value_heads": kv_heads, "head_dim": 32, "vocab_size": VOCAB, "max_position_embeddings": 128,
    }  # fmt: skip
    others = {"initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    others |= {"num_labels": 1} if scalar else {}
    config = AutoConfig.for_model(options.pop("model_type"), **(sizes | others | options))
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.15)
        elif "embed" in parameter_name and name == "gemma3_text":
            torch.nn.init.normal_(parameter, std=0.05)  # it is scaled; else each token would predict itself for sure
    model.save_pretrained(path)
    return str(path)


def oracle(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def learn(rank: int, case: Case) -> tuple[np.ndarray | None, dict[str, tuple], float, dict[str, tuple], int]:
    """Logits [rows, S, V / tp] on the last stage, weights, the gradient's norm and weights after a step by GRADIENT,
    bytes on the device then."""
    engine = replace(case, optimizer=GRADIENT).build(rank)
    sequences, batch = cases.make_rows(8)
    (micro,) = engine._cut(sequences, 1)
    weight = engine._model.head_weight("lm") if engine._groups.is_last_stage else None

    def logits(hidden: Tensor, _: object) -> np.ndarray:
        assert weight is not None
        found_BSV = (hidden.flatten(0, 1)[micro.packing.place_SB] @ weight.t()).transpose(0, 1)
        return found_BSV[micro.rows.argsort()].numpy()

    engine._model.eval()
    with torch.no_grad():
        found = engine._run([(micro, logits)])
    before = cases.held(engine)
    norm = cases.train_on(engine, sequences, batch, cases.loss, cases.Walk("logprobs"))["grad_norm"]
    return (found[0] if found else None), before, norm, cases.held(engine), engine.device_bytes()


def record(record_property: Callable[[str, object], None], family: str, what: str, value: float) -> None:
    """Note a difference in the report of tests, for `benchmarks.parts.families`."""
    record_property("difference", json.dumps([family, what, float(value)]))


def gradients(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """What a step by GRADIENT says of the gradient."""
    moved = before.astype(np.float64) - after
    return moved / (1 - np.abs(moved))


def expected(folder: str) -> tuple[Tensor, dict[str, Tensor], float]:
    """Logits, gradients by name and their norm, by transformers and plain torch."""
    model = oracle(folder)
    sequences, batch = cases.make_rows(8)
    made = cases.loss(cases.oracle_outputs(model, sequences, "lm"), batch)
    ((made.values * batch["mask"]).sum() / batch["mask"].sum()).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        logits = model(sequences.tokens_BS).logits
    return logits, found, float(torch.stack([value.norm() for value in found.values()]).norm())
