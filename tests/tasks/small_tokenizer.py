"""A tokenizer of whole words, made in a moment, with a chat template: `<s>` begins a text, `</s>` ends it."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", "a", "good", "bad", "film", "what", "is", "it", "the", "best"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def save_small_tokenizer(folder: Path, template: str | None = TEMPLATE) -> str:
    """Write the tokenizer's folder; ids are positions in WORDS."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


def save_letter_tokenizer(folder: Path) -> str:
    """Write a tokenizer of single letters, in bytes: transformers reads any tokenizer of a Qwen 2 as one of bytes."""
    letters = ["\u0120", *sorted(set("".join(WORDS[3:])))]  # the first is a space
    vocab = {token: i for i, token in enumerate([*WORDS[:3], *letters])}
    of_bytes = Tokenizer(models.BPE(vocab, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=of_bytes, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return str(folder)


def ids(text: str) -> list[int]:
    """Token ids of words, by looking them up."""
    return [WORDS.index(word) for word in text.split()]
