"""How far every model family is from transformers in float32, by layout; prints a table, and JSON as its last line.

    python -m benchmarks.parts.families [--family NAME] [--engine megatron | vllm]

It runs the tests that compare them, of which all must pass, and reads what they found: the largest differences of
logits and gradients (Megatron) and of log-probabilities (vLLM), over key-value heads 6, 3 and 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

TESTS = {
    "megatron": "tests/engines/megatron/test_families.py",
    "vllm": "tests/engines/vllm/test_vllm_families.py",
}
Differences = dict[str, dict[str, float]]
"""Family -> layout and quantity -> the largest difference."""


def main() -> None:
    """Run, read, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="", help="only those whose name begins so, e.g. qwen3")
    parser.add_argument("--engine", choices=tuple(TESTS), help="only this one (default: both)")
    options = parser.parse_args()
    found: Differences = defaultdict(lambda: defaultdict(float))
    for name in (options.engine,) if options.engine else TESTS:
        for family, what, value in run(TESTS[name], options.family):
            found[family][what] = max(found[family][what], value)
    if not found:
        sys.exit(f"--family: got {options.family!r}, expected the beginning of a family's name, as qwen3")
    columns = sorted({what for values in found.values() for what in values})
    print(f"| family | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for family, values in found.items():
        print(f"| {family} | {' | '.join(f'{values[what]:.1e}' if what in values else '' for what in columns)} |")
    print(json.dumps({"differences": found, "largest": {what: largest(found, what) for what in columns}}))


def largest(found: Differences, what: str) -> float:
    """Return the largest of all families."""
    return max(values.get(what, 0.0) for values in found.values())


def run(tests: str, family: str) -> Iterator[tuple[str, str, float]]:
    """Run a file of tests; yield family, layout with quantity, and difference. Exits where one failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "all", "-p", "no:cacheprovider", tests]
        options = ["-o", "junit_family=xunit1", f"--junitxml={report}", *(["-k", family] if family else [])]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        if done.returncode not in (0, 5):  # 5: no such test
            sys.exit(done.stdout[-4000:])
        cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        for entry in case.iter("property"):
            name, what, value = json.loads(entry.attrib["value"])
            if name.startswith(family):
                yield name, what, value


if __name__ == "__main__":
    main()
