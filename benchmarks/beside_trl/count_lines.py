"""How many lines of code PPO, GRPO and ReMax are here, in TRL and in verl, without blanks, comments and docstrings.

    pip download --no-deps -d wheels trl==1.12.0 trl==1.16.0 verl==0.9.1
    for wheel in wheels/*.whl; do unzip -q "$wheel" -d "wheels/$(basename "${wheel%%-py3*}")"; done
    python -m benchmarks.beside_trl.count_lines wheels

Counted is what a reader has to read who asks what the algorithm does: the order of its calls, and its arithmetic and
settings. Where a library has both in one class, the whole file counts. Without a folder, ours alone.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
RL = "tasks/rl"
OLD_TRL, TRL, CORE = "trl-1.12.0/trl", "trl-1.16.0/trl", "verl-0.9.1/verl/trainer/ppo/core_algos.py"
FIT = "verl-0.9.1/verl/trainer/ppo/ray_trainer.py:RayPPOTrainer.fit"
PENALISED = [
    f"{RL}/rewards.py:kl_penalised_rewards", f"{RL}/rewards.py:placed_scores", f"{RL}/rewards.py:shape_scores",
    f"{RL}/rewards.py:rollout_metrics", f"{RL}/kl.py", f"{RL}/settings/online.py:KLControl",
]  # fmt: skip
"""Rewards with a KL penalty, which PPO and ReMax share here."""
PARTS = {
    "ours": {
        "PPO": (
            ["flows/ppo.py:ppo"],
            [
                f"{RL}/losses.py:ppo_clip", f"{RL}/losses.py:value_clip", f"{RL}/losses.py:ratio_metrics",
                f"{RL}/losses.py:clipped_surrogate", f"{RL}/gae.py:gae", f"{RL}/gae.py:gae_advantages", *PENALISED,
                f"{RL}/settings/online.py:PPO",
            ],
        ),
        "GRPO": (
            ["flows/grpo.py:grpo"],
            [
                *(f"{RL}/losses.py:{name}" for name in (
                    "grpo", "ratio_metrics", "clipped_surrogate", "sequence_ratio", "weighted_gain",
                )),
                *(f"{RL}/group_advantages.py:{name}" for name in (
                    "grpo_advantages", "_advantages", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus",
                    "reinforce_plus_plus_baseline", "gdpo",
                )),
                *(f"{RL}/score_shaping.py:{name}" for name in (
                    "truncated_rows", "response_lengths", "overlong_penalty",
                )),
                f"{RL}/groups.py", f"{RL}/settings/policy.py", f"{RL}/kl.py", f"{RL}/settings/online.py:GRPO",
            ],
        ),
        "ReMax": (
            ["flows/remax.py:remax"],
            [
                f"{RL}/losses.py:policy_gradient", f"{RL}/gae.py:remax_advantages", *PENALISED,
                f"{RL}/settings/online.py:ReMax",
            ],
        ),
    },
    "TRL": {
        "PPO": ([f"{OLD_TRL}/experimental/ppo/ppo_trainer.py"], [f"{OLD_TRL}/experimental/ppo/ppo_config.py"]),
        "GRPO": ([f"{TRL}/trainer/grpo_trainer.py"], [f"{TRL}/trainer/grpo_config.py"]),
    },
    "verl": {
        "PPO": ([FIT], [f"{CORE}:{name}" for name in (
            "compute_gae_advantage_return", "compute_policy_loss_vanilla", "compute_value_loss", "kl_penalty",
            "AdaptiveKLController",
        )]),
        "GRPO": ([FIT], [f"{CORE}:{name}" for name in (
            "compute_grpo_outcome_advantage", "compute_policy_loss_vanilla", "kl_penalty",
        )]),
        "ReMax": ([FIT], [f"{CORE}:{name}" for name in (
            "compute_remax_outcome_advantage", "compute_policy_loss_vanilla", "kl_penalty",
        )]),
    },
}  # fmt: skip
"""Of each library and algorithm: what says the order of calls, and the arithmetic and settings; FILE or FILE:NAME."""


def main(arguments: list[str]) -> None:
    """Print a line for each, and all of them as JSON last."""
    wheels = Path(arguments[0]) if arguments else None
    counted: dict[str, dict[str, list[int]]] = {}
    for library, algorithms in PARTS.items():
        folder = ROOT if library == "ours" else wheels
        for algorithm, (order, arithmetic) in algorithms.items():
            if folder is not None:
                lines = [sum(lines_of(folder, part) for part in parts) for parts in (order, arithmetic)]
                counted.setdefault(library, {})[algorithm] = lines
                print(f"{library:5} {algorithm:6} order {lines[0]:5}  arithmetic and settings {lines[1]:5}")
    print(json.dumps(counted))


def lines_of(folder: Path, part: str) -> int:
    """Return the lines of code of a file, or of a class or function in it."""
    file, _, name = part.partition(":")
    text = (folder / file).read_text()
    node: ast.AST = ast.parse(text)
    for word in name.split(".") if name else ():
        inside = (below for below in ast.walk(node) if getattr(below, "name", None) == word)
        node = next(inside, None) or sys.exit(f"{part} is not there")
    said = {line for below in ast.walk(node) for line in docstring_lines(below)}
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) if name else 1
    last = node.end_lineno if name else len(text.splitlines())
    return len({line for line in code_lines(text) if first <= line <= last} - said)


def code_lines(text: str) -> set[int]:
    """Return the numbers of lines that have more than comments on them."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {line for token in tokens if token.type not in SILENT for line in range(token.start[0], token.end[0] + 1)}


def docstring_lines(node: ast.AST) -> range:
    """Return the lines of a node that is a text standing alone."""
    alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1) if alone else range(0)


if __name__ == "__main__":
    main(sys.argv[1:])
