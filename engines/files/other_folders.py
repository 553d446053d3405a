"""Recognises folders that were named instead of a model's, and says what to do."""

from pathlib import Path

from prefect_rlhf.files.model_folder import is_adapter

MOST_FOLDERS = 3  # in a hint
_SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"


def without_config(folder: Path) -> str:
    """Describe a folder without config.json, and name the folder or command that is right."""
    if is_adapter(folder):
        return of_adapter(folder)
    if (snapshots := sorted((folder / "snapshots").glob("*/config.json"))) != []:
        return f"it is an entry of the Hub's cache: {snapshots[-1].parent}"
    if any(folder.glob("*.gguf")):
        return "it has GGUF files: take the folder that they were made of, with safetensors"
    if inside := sorted(file.parent for file in folder.glob("*/config.json")):
        return f"it has no config.json, but holds {', '.join(map(str, inside[:MOST_FOLDERS]))}"
    return "it has no config.json"


def of_adapter(folder: Path) -> str:
    """Say how to state an adapter."""
    return f"it is an adapter (LoRA): give its base model as path, and this folder as adapter.path={folder}"


def without_safetensors(folder: Path) -> str:
    """Describe a folder without its safetensors files, and a remedy; empty if the cause is unclear."""
    if is_adapter(folder):
        return f"; {of_adapter(folder)}"
    if any(folder.glob("*.bin")):
        remedy = "if you trust them, load them with transformers, and save_pretrained writes safetensors"
        return f"; it has torch's own files (.bin), which may run code when they are read: {remedy}"
    if any(folder.glob(_SHARDS)):
        return "; the download is not complete: run it again"
    if others := sorted(file.name for file in folder.glob("*.safetensors")):  # Mistral's consolidated.safetensors
        return (
            f"; it has {others[0]}, which transformers does not read: take the model with model.safetensors or shards"
        )
    return ""
