"""A small model whose responses are as long as their prompts say: from a number it counts down, and ends after 1.

Layers are random, and small beside the embeddings: the head reads from a number's embedding which number is next. Each
number has four words that are equally likely, so responses to one prompt differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>")
END = SPECIAL.index("</s>")
WORDS = "abcd"
"""Suffixes of the words of a number."""
EMBEDDED, CERTAIN = 4.0, 2.0
"""Sizes of embeddings and of rows of the head: a word of the next number has a logit of about 45, others of about 0."""


def make_countdown(folder: Path, *, most: int, hidden: int, layers: int) -> str:
    """Write a Llama in float32 that counts down from numbers up to `most`, with its tokenizer; return the folder."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=-(-(len(SPECIAL) + most * len(WORDS)) // 64) * 64,
        max_position_embeddings=2 * most,
        tie_word_embeddings=False,
        bos_token_id=SPECIAL.index("<s>"),
        eos_token_id=END,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    embedded, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    embedded.normal_(0, EMBEDDED / 4)
    head.zero_()
    for number in range(1, most + 1):
        direction = torch.randn(hidden)
        embedded[tokens(number)] += EMBEDDED * direction
        head[tokens(number - 1) if number > 1 else END] = CERTAIN * direction / direction.norm()
    model.save_pretrained(folder)
    save_words(folder, most)
    return str(folder)


def tokens(number: int) -> slice:
    """Return the ids of the words of a number, from 1 on."""
    first = len(SPECIAL) + (number - 1) * len(WORDS)
    return slice(first, first + len(WORDS))


def prompt(length: int) -> str:
    """Return a prompt whose response has so many tokens."""
    return f"{length}{WORDS[0]}"


def save_words(folder: Path, most: int) -> None:
    """Write the tokenizer of the words of all numbers."""
    words = [*SPECIAL, *(f"{number}{suffix}" for number in range(1, most + 1) for suffix in WORDS)]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)


def first_words(completions: list[str], **_: Any) -> list[float]:
    """Score each response by its share of first words of a number, as TRL calls a reward."""
    return [text.count(WORDS[0]) / max(1, len(text.split())) for text in completions]
