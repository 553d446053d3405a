"""A small model whose responses are as long as their prompts say: from a number it counts down, and ends after 1.

Layers are random, and small beside the embeddings: the head reads from a number's embedding which number is next. Each
number has four words that are equally likely, so responses to one prompt differ.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.planner.countdown import END, SPECIAL, tokens, vocabulary

EMBEDDED, LOGIT = 4.0, 45.0
"""The size of embeddings, and about the logit of each word of the next number; others have about 0."""


def make_countdown(folder: Path, *, most: int, hidden: int, layers: int) -> str:
    """Write a Llama that counts down from numbers up to `most`, with its tokenizer; return the folder."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=-(-len(vocabulary(most)) // 64) * 64,
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
        head[tokens(number - 1) if number > 1 else END] = LOGIT / hidden**0.5 * direction / direction.norm()
    model.save_pretrained(folder)
    save_words(folder, most)
    return str(folder)


def save_words(folder: Path, most: int) -> None:
    """Write the tokenizer of the words of all numbers."""
    words = {word: at for at, word in enumerate(vocabulary(most))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
