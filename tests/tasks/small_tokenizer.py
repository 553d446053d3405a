"""A tokenizer of whole words, made in a moment, with a chat template: `<s>` begins a text, `</s>` ends it."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.rows.token_writers import speaking_role, token_writers
from prefect_rlhf.placement.rows.tokenizers import Tokenizers

WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", "a", "good", "bad", "film", "what", "is", "it", "the", "best"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def save_small_tokenizer(folder: Path, template: str | dict[str, str] | None = TEMPLATE) -> str:
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


def alone(folder: str = "", graph: DataflowGraph | None = None) -> Tokenizers:
    """The tokenizer of a folder, which all roles of a graph have; or an actor."""
    if graph is None:
        return Tokenizers("actor", {"actor": folder})
    return Tokenizers(speaking_role(graph), {m.role: folder for m in graph.models}, dict(token_writers(graph)))


def ids(text: str) -> list[int]:
    """Token ids of words, by looking them up."""
    return [WORDS.index(word) for word in text.split()]


def save_bpe_tokenizer(folder: Path, texts: list[str]) -> str:
    """Write a byte-level BPE of these texts, whose ids differ from those of the tokenizer of words."""
    of_bytes = Tokenizer(models.BPE())
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    of_bytes.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=320, special_tokens=["<e>"], initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token="<e>")
    fast.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    fast.save_pretrained(folder)
    return str(folder)
