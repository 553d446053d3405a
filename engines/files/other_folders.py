"""Folders that are not a model's: named in place of a Hugging Face folder, with what to do."""

from pathlib import Path

from prefect_rlhf.files.hub.snapshots import ADAPTER

MOST_FOLDERS = 3  # in a hint


def without_config(folder: Path) -> str:
    """Say what a folder without config.json is, and which folder or command is right."""
    if (folder / ADAPTER).is_file():
        return of_adapter(folder)
    if (snapshots := sorted((folder / "snapshots").glob("*/config.json"))) != []:
        return f"it is an entry of the Hub's cache: {snapshots[-1].parent}"
    if any(folder.glob("*.gguf")):
        return "it has GGUF files: take the folder that they were made of, with safetensors"
    if inside := sorted(file.parent for file in folder.glob("*/config.json")):
        return f"it has no config.json, but holds {', '.join(map(str, inside[:MOST_FOLDERS]))}"
    return "it has no config.json"


def of_adapter(folder: Path) -> str:
    """Say how to merge an adapter into its base model."""
    merged = f"{folder}-merged"
    code = f"M.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained({merged!r})"
    command = f'python -c "from peft import AutoPeftModelForCausalLM as M; {code}"'
    return f"it is an adapter (LoRA): merge it first, {command}, then copy the base model's tokenizer to {merged}"


def without_safetensors(folder: Path) -> str:
    """Say what a folder without its safetensors files is, and what to do; empty if that is not clear."""
    if (folder / ADAPTER).is_file():
        return f"; {of_adapter(folder)}"
    if any(folder.glob("*.bin")):
        remedy = "if you trust them, load them with transformers, and save_pretrained writes safetensors"
        return f"; it has torch's own files (.bin), which may run code when they are read: {remedy}"
    if any(folder.glob("*.safetensors")):
        return "; the download is not complete: run it again"
    return ""
