"""A random Qwen2 with a token per letter, drawn on the device, and prompts of exactly so many letters."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path

from benchmarks.one_card.work import SIZES, Work

PROMPTS, HELD_OUT = 600, 8
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_model(work: Work) -> None:
    """Write the model's folder, unless it is there; a folder that is there is whole."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    if work.model.is_dir():
        return
    size, part = SIZES[work.size], work.model.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tokens = {"<|endoftext|>": 0, **{letter: i + 1 for i, letter in enumerate(sorted(ByteLevel.alphabet()))}}
    tokens |= {f"t{i}": i for i in range(len(tokens), size.vocabulary)}
    Qwen2Tokenizer(vocab=tokens, merges=[]).save_pretrained(part)
    config = Qwen2Config(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        tie_word_embeddings=size.is_tied,
        max_position_embeddings=32768,
        rope_theta=1e6,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(work.kind):
        model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and weight.dim() > 1:
                weight.normal_(std=0.02)
    model.save_pretrained(part, max_shard_size="20GB")
    part.rename(work.model)


def make_prompts(work: Work) -> None:
    """Write the prompts as JSON lines, unless they are there; the last few are held out."""
    if work.prompts.is_file():
        return
    drawn = random.Random(0)
    part = work.prompts.with_suffix(".part")
    with part.open("w", encoding="utf-8") as lines:
        for row in range(PROMPTS):
            prompt = "".join(drawn.choices(LETTERS, k=work.prompt_tokens))
            split = "held_out" if row >= PROMPTS - HELD_OUT else "train"
            lines.write(json.dumps({"prompt": prompt, "split": split}) + "\n")
    part.rename(work.prompts)


def num_parameters(folder: Path) -> int:
    """Count the weights in a model's folder; a tied embedding is one matrix."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  the object is no mapping
                product = 1
                for extent in tensors.get_slice(name).get_shape():
                    product *= extent
                total += product
    return total


if __name__ == "__main__":
    asked = Work.read(sys.argv[1])
    began = time.monotonic()
    make_model(asked)
    make_prompts(asked)
    made = {"finding": "model", "folder": str(asked.model), "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps({**made, "parameters": num_parameters(asked.model)}), flush=True)
