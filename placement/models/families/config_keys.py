"""Keys of a config.json that every family has: keys that are read, and keys without effect on the computation."""

from typing import Any

READ = frozenset(
    (
        "architectures",
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
    )
)
HARMLESS = frozenset(
    (
        "cache_implementation",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "dtype",
        "torch_dtype",
        "id2label",
        "is_llama_config",
        "label2id",
        "num_labels",
        "problem_type",
        "initializer_range",
        "pretraining_tp",  # how a product is cut
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "task_specific_params",
        "tokenizer_class",
        "transformers_version",
        "transformers.js_config",
        "use_cache",
    )
)
"""Keys about tokens, labels, formats and the file's author."""
ON = frozenset(("is_causal",))
"""Switches that are on in a file without them: there, false or null changes the computation."""
NOTES = ("_", "unsloth_")
"""Prefixes of keys that a library notes for itself."""
GENERATION = frozenset(
    (
        "max_length",
        "max_new_tokens",
        "min_length",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "num_beams",
        "num_return_sequences",
        "early_stopping",
    )
)
"""Defaults of sampling that older versions of transformers wrote; we use only the sampling that you request."""
ROPE = frozenset(
    (
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    )
)
"""Keys of rotary settings."""


def is_off(value: Any) -> bool:
    """Whether this value of a key switches it off.

    >>> [is_off(value) for value in (None, False, 0, {}, 1.0, "linear")]
    [True, True, True, True, False, False]
    """
    return not value
