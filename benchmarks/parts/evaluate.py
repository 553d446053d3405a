"""Seconds of an evaluation beside vLLM's own offline loop: the same model, prompts, samples and lengths.

    python -m benchmarks.parts.evaluate --model first/models/smollm2 --prompts 1000 --samples 8

Ours is the step of `prefect-rlhf evaluate`: answers, scores by a function, the record with its intervals, and the
controller's work. vLLM's is `LLM.generate` alone, in its own process. Both begin with a loaded model, after the same
work as a warm-up. Each round measures both, so that both meet the same load; `ratio` is the median of ours over the
median of vLLM's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from prefect_rlhf import run
from prefect_rlhf.flows.algorithm.evaluation.flow import evaluate

WORDS = ["film", "good", "bad", "story", "actor", "scene", "music", "light", "dark", "long", "short", "plot", "end"]
REWARD = "def length(row):\n    return float(len(row['response']))\n"
LOOP = """
import json, sys, time
from vllm import LLM, SamplingParams

def main():
    asked = json.loads(sys.argv[1])
    model = LLM(asked["model"], dtype=asked["dtype"], kv_cache_memory_bytes=2 << 30, enforce_eager=True)
    sampling = SamplingParams(n=asked["samples"], temperature=1.0, max_tokens=asked["tokens"], ignore_eos=True)
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        model.generate(asked["prompts"], sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    print(seconds[-1])

if __name__ == "__main__":
    main()
"""


def main() -> None:
    """Measure both in turn; print the seconds and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder of a language model")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    asked = parser.parse_args()
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = make_texts(asked.prompts)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        (folder / "reward.py").write_text(REWARD)
        (folder / "loop.py").write_text(LOOP)
        for _ in range(asked.rounds):
            ours.append(our_seconds(folder, asked))
            theirs.append(vllm_seconds(folder, asked, texts))
            print(f"ours {ours[-1]:.2f} s, vLLM {theirs[-1]:.2f} s", flush=True)
    ratio = median(ours) / median(theirs)
    print(json.dumps({"ours_seconds": ours, "ratio": round(ratio, 3), "vllm_seconds": theirs}))


def make_texts(count: int) -> list[str]:
    """Return random sentences, the same each time."""
    draw = random.Random(0)
    return [f"What is said of {' '.join(draw.choices(WORDS, k=draw.randint(5, 40)))}?" for _ in range(count)]


def our_seconds(folder: Path, asked: argparse.Namespace) -> float:
    """Return the seconds of the second of two equal steps, from the answers to the record."""
    one = {
        "data": {"path": str(folder / "prompts.jsonl"), "split_column": None},
        "samples": asked.samples,
        "temperature": 1.0,
        "max_new_tokens": asked.tokens,
    }
    result = run(
        evaluate,
        actor={"path": asked.model, "dtype": asked.dtype},
        evaluation={"prompts": one},
        reward={"functions": {"length": {"function": f"{folder}/reward.py:length"}}},
        algo={"sampling": {"stop_at_eos": False}},
        steps=2,
        output_dir=str(folder / "runs"),
    )
    return result.metrics[-1]["seconds"]


def vllm_seconds(folder: Path, asked: argparse.Namespace, texts: list[str]) -> float:
    """Return the seconds of vLLM's second of two equal loops."""
    told: dict[str, Any] = {name: getattr(asked, name) for name in ("model", "dtype", "samples", "tokens")}
    told["prompts"] = texts
    words = [sys.executable, str(folder / "loop.py"), json.dumps(told)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
