"""Stand-ins for the tokenizers of families: bytes, with merges, the words of Llama 3 and Qwen, and special tokens."""

import json
import shutil
from pathlib import Path

import mistral_common
from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
OF_INIT = Path(__file__).parents[3] / "src" / "prefect_rlhf" / "template" / "tools.jinja"
OF_QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
SPECIAL = {
    "qwen2_5": OF_QWEN,
    "tools": OF_QWEN,
    "qwen3": (*OF_QWEN, "<think>", "</think>", "<tool_response>", "</tool_response>"),
    "llama3_1": ("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "gemma3": ("<bos>", "<end_of_turn>", "<start_of_turn>", "<eos>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
}
"""The special tokens of a family: the first begins a text if the template does that, the second ends a turn.

`tools` is the template that `prefect-rlhf init` writes, for models such as SmolLM2.
"""
FAMILIES = list(SPECIAL)
WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["the film is good\n\nand the code is 4711\n", "user\nassistant\nmodel\n\n", "<think>\n\n</think>\n\n"] * 3


def stand_in(family, folder, words=()):
    """Save a tokenizer with the special tokens and the template of a family; `words` are added tokens, not special."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(WORDS, "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([split, of_bytes]), decoders.ByteLevel()
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=bytes_, show_progress=False))
    begin, end, *more = (token for token in SPECIAL[family] if token not in words)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=begin, eos_token=end, additional_special_tokens=more
    )
    fast.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    fast.chat_template = template(family)
    fast.save_pretrained(folder)
    ends = [token for token in SPECIAL[family] if token in ("<|eot_id|>", "<|eom_id|>")]  # as in Llama 3.1's folder
    if ends:
        ids = {"eos_token_id": fast.convert_tokens_to_ids(ends)}
        (folder / "generation_config.json").write_text(json.dumps(ids))
    return str(folder)


def template(family):
    if family == "tools":
        return OF_INIT.read_text()
    if family != "mistral":
        return (TEMPLATES / f"{family}.jinja").read_text()
    return generate_chat_template(
        spm=False,
        tokenizer_version=TokenizerVersion.v3,
        image_support=False,
        audio_support=False,
        thinking_support=False,
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=True,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )


OF_SENTENCEPIECE = {
    "mistral": "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>",
    "zephyr": "<|user|>\n{{ m.content }}</s>\n{% else %}<|assistant|>\n{{ m.content }}</s>\n",
}
HEADING = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def of_sentencepiece(folder, template):
    """Save Mistral's first tokenizer, which puts a space before a text's first word, as Llama 2's does."""
    shutil.copy(Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1", folder / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    turns = "{% for m in messages %}{% if m.role == 'user' %}" + OF_SENTENCEPIECE[template] + "{% endif %}{% endfor %}"
    settings["chat_template"] = ("<s>" + turns) if template == "mistral" else turns + HEADING
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)
