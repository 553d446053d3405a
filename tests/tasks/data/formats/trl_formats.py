"""Functions of TRL 1.16.0 (Apache-2.0, Copyright 2020-2026 The HuggingFace Team), to compare ours with.

Copied from trl-1.16.0-py3-none-any.whl: trl/data_utils.py. Changed: docstrings and annotations.
"""


def extract_prompt(example):
    """trl/data_utils.py, extract_prompt"""
    for idx in range(min(len(example["chosen"]), len(example["rejected"]))):
        if example["chosen"][idx] != example["rejected"][idx]:
            if example["chosen"][idx - 1] == " ":  # remove space before the prompt
                idx -= 1
            break
    return {
        "prompt": example["chosen"][:idx],
        "chosen": example["chosen"][idx:],
        "rejected": example["rejected"][idx:],
    }


def maybe_convert_to_chatml(example):
    """trl/data_utils.py, maybe_convert_to_chatml"""
    for key in ["prompt", "completion", "chosen", "rejected", "messages", "conversations"]:
        if key in example and isinstance(example[key], list):
            messages = example[key]
            for message in messages:
                if isinstance(message, dict):
                    if "from" in message:
                        message["role"] = message.pop("from")
                    if "value" in message:
                        message["content"] = message.pop("value")

    if "conversations" in example:
        example["messages"] = example.pop("conversations")

    return example
