"""Harm real training runs at random moments, and see that each ends by itself with the weights of an undisturbed run.

A moment is one fresh flow run of PPO on two CPU ranks under a worker, and one victim: when so many task runs have
ended, a process of the run is killed or frozen, the worker is killed, the server goes away for a while, the disk of the
run fills up, or a person suspends or cancels it. With `--gang ray` the ranks are on two of three nodes, network
namespaces, of which one is switched off, cut off or slowed down, or their head is killed. Needs root for the disk (a
tmpfs) and the namespaces.

    python -m benchmarks.faults.chaos --moments 50 --seed 1
    python -m benchmarks.faults.chaos --moments 50 --seed 1 --gang ray
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq

from benchmarks.faults.chaos_site import ChaosSite
from tests.blocks.prefect_site import everything_up
from tests.support.ray_nodes import ray_nodes
from tests.support.small_disk import small_disk

TIMES = ("seconds", "orchestration_share", "fingerprint_share")  # metrics that no two runs have in common
LIMIT_SECONDS = 300.0  # for a harmed run to end
SETTLE_SECONDS = 60.0  # for processes to go and records to close
DISK_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Moment:
    """One harm: `victim`, when `lines` task runs have ended and `delay` seconds more; `away` is for a server."""

    victim: str
    lines: int
    delay: float
    away: float


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a harmed run. `lost_steps` were done again; `problems` are words, none for a run that recovered."""

    moment: Moment
    identical: bool
    orphans: int
    lost_steps: int
    seconds_to_recover: float
    problems: tuple[str, ...]


def main(arguments: list[str] | None = None) -> None:
    """Draw the moments, do harm, print a line for each and one line of JSON last."""
    options = parser().parse_args(arguments)
    victims = options.victims.split(",") if options.victims else list(VICTIMS_OF[options.gang])
    results = []
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as name,
        small_disk(Path(name) / "runs", DISK_BYTES) as output_dir,  # before the nodes, which see what is mounted then
        ray_nodes((1, 1, 1)) if options.gang == "ray" else nullcontext() as nodes,
        everything_up(ChaosSite(Path(name), output_dir, options.steps, nodes)) as site,
    ):
        reference, lines = undisturbed(site)
        for moment in draw(options.moments, options.seed, lines, victims):
            results.append(live_through(site, moment, reference))
            print(json.dumps(asdict(results[-1])), flush=True)
    print(json.dumps(summary(results)))
    sys.exit(0 if all(not result.problems for result in results) else 1)


def parser() -> argparse.ArgumentParser:
    """Return the flags."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--moments", type=int, default=50)
    top.add_argument("--seed", type=int, default=1)
    top.add_argument("--steps", type=int, default=5)
    top.add_argument("--gang", choices=sorted(VICTIMS_OF), default="local")
    top.add_argument("--victims", default="", help="comma-separated; without it, all of the gang's")
    return top


def summary(results: list[Result]) -> dict[str, float]:
    """Return what is printed last."""
    return {
        "moments": len(results),
        "recovered": sum(not result.problems for result in results),
        "identical": sum(result.identical for result in results),
        "orphans": sum(result.orphans for result in results),
        "lost_steps_max": max(result.lost_steps for result in results),
        "seconds_to_recover_median": round(median(result.seconds_to_recover for result in results), 1),
    }


def draw(number: int, seed: int, lines: int, victims: list[str]) -> Iterator[Moment]:
    """Draw moments over the whole of a run that ends `lines` task runs; every victim comes in turn."""
    chance = random.Random(seed)
    order: list[str] = []
    for _ in range(number):
        order = order or chance.sample(victims, len(victims))
        yield Moment(order.pop(), chance.randrange(1, lines), round(chance.uniform(0, 0.5), 2), chance.uniform(5, 40))


def undisturbed(site: ChaosSite) -> tuple[Path, int]:
    """Return the folder of a run to its end, and the number of its task runs."""
    run = site.run("chaos")
    site.until_state(run, "COMPLETED", LIMIT_SECONDS)
    folder = site.run_dir(run)
    return folder, site.lines(folder, "task_runs.jsonl")


def live_through(site: ChaosSite, moment: Moment, reference: Path) -> Result:
    """Run, do harm, wait for the end, and look at everything that is left."""
    run = site.run("chaos")
    folder = None
    try:
        site.until(lambda: site.run_dir(run).is_dir(), LIMIT_SECONDS)
        folder = site.run_dir(run)
        site.until(lambda: site.lines(site.run_dir(run), "task_runs.jsonl") >= moment.lines, LIMIT_SECONDS)
        time.sleep(moment.delay)
        steps_before, harmed_at = site.lines(folder, "metrics.jsonl"), time.monotonic()
        last = VICTIMS_OF["ray" if site.nodes else "local"][moment.victim](site, run, moment)

        def steps() -> int:
            return site.lines(site.run_dir(last), "metrics.jsonl")  # a new run gets its name as it starts

        site.until(lambda: site.is_final(last) or steps() > steps_before, LIMIT_SECONDS)
        recovered_after = time.monotonic() - harmed_at
        site.until_state(last, "COMPLETED", LIMIT_SECONDS)
        in_last = site.run_dir(last)
        with suppress(AssertionError):
            site.until(lambda: not (left_over(site, {run, last}) or site.open_runs(run)), SETTLE_SECONDS)
        orphans = len(site.left_of(run)) + len(site.left_of(last) if last != run else [])
        differences = tuple(differing(in_last, reference))
        problems = (*differences, *left_over(site, {run, last}), *(f"open: {name}" for name in site.open_runs(run)))
        trained = sum(site.finished_calls(each, "actor.train_step") for each in {run, last})
        lost = trained - site.steps
        return Result(moment, not differences, orphans, lost, round(recovered_after, 1), problems)
    except Exception as error:  # noqa: BLE001  one run that does not recover is the finding, not the end of the others
        traceback.print_exc()
        end_of(site, run)
        state = site.state(run)
        problem = f"{type(error).__name__}; state {state['type']} {state['name']}: {state['message']}"
        return Result(moment, False, len(site.left_of(run)), 0, LIMIT_SECONDS, (problem[:500],))
    finally:
        if site.nodes is not None:
            site.nodes.mend()
        for each in site.output_dir.glob("*"):
            if each != reference and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)


def left_over(site: ChaosSite, runs: set[str]) -> tuple[str, ...]:
    """Return what should be gone: processes, leases, temporary folders, unfinished files."""
    processes = [f"process {pid}" for run in runs for pid in site.left_of(run)]
    held = [f"lease {path.name}" for path in (site.folder / "leases").glob("*/n*.lease") if is_locked(path)]
    folders = [f"folder {path.name}" for path in site.temporary.glob("gpu-mesh-*")]
    parts = [f"file {path.name}" for path in site.output_dir.glob("*/**/*.part")]
    return (*processes, *held, *folders, *parts)


def is_locked(path: Path) -> bool:
    """Whether some process holds a lease's file."""
    return subprocess.run(["flock", "--nonblock", str(path), "true"], check=False).returncode != 0


def differing(folder: Path, reference: Path) -> Iterator[str]:
    """Yield what of a run's result is not as in the undisturbed run: weights, metrics of a step, rollouts of a step."""
    for role in ("actor", "critic"):
        file = Path(role) / "model.safetensors"
        if not (folder / file).is_file() or (folder / file).read_bytes() != (reference / file).read_bytes():
            yield f"weights of {role}"
    if metrics(folder) != metrics(reference):
        yield f"metrics: steps {[row['step'] for row in metrics(folder)]}"
    names = [path.relative_to(reference) for path in sorted(reference.glob("*/step-*.parquet"))]
    if names != [path.relative_to(folder) for path in sorted(folder.glob("*/step-*.parquet"))]:
        yield "files of rollouts"
        return
    yield from (f"rows of {name}" for name in names if pq.read_table(folder / name) != pq.read_table(reference / name))


def metrics(folder: Path) -> list[Mapping[str, Any]]:
    """Read a run's metrics without those that are times."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def end_of(site: ChaosSite, run: str) -> None:
    """End a run that did not recover, so that the next one has the machine."""
    with suppress(Exception):
        site.ask(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
    for pid in site.left_of(run):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def signal_one(kind: str, number: int) -> Callable[[ChaosSite, str, Moment], str]:
    """Return the harm of a signal to one process of the run."""

    def harm(site: ChaosSite, run: str, moment: Moment) -> str:
        of_kind = site.processes_of(run)[kind]
        if of_kind:  # else it has ended by itself just now
            os.kill(of_kind[moment.lines % len(of_kind)], number)
        return run

    return harm


def kill_worker(site: ChaosSite, run: str, moment: Moment) -> str:
    """Kill the worker; a service manager starts another one."""
    site.kill("worker")
    time.sleep(1)
    site.start_worker()
    return run


def lose_server(site: ChaosSite, run: str, moment: Moment) -> str:
    """Kill the server, which comes back after a while with its database."""
    site.kill("server")
    time.sleep(moment.away)
    site.start_server()
    return run


def fill_disk(site: ChaosSite, run: str, moment: Moment) -> str:
    """Fill the disk until the run notices; then a person makes room."""
    filler, attempts = site.output_dir / "filler", site.ask(f"/flow_runs/{run}")["run_count"]
    try:
        with filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise

    def has_noticed() -> bool:
        flow_run = site.ask(f"/flow_runs/{run}")
        return flow_run["state_type"] != "RUNNING" or flow_run["run_count"] > attempts

    try:
        site.until(has_noticed, LIMIT_SECONDS)
    finally:
        filler.unlink()
    return run


def suspend_and_resume(site: ChaosSite, run: str, moment: Moment) -> str:
    """Press Suspend, wait until the devices are free, press Resume."""
    site.set_state(run, {"type": "PAUSED", "name": "Suspended"})
    site.until(lambda: not site.left_of(run), LIMIT_SECONDS)
    if not site.is_final(run):
        site.resume(run)
    return run


def cancel_and_resume(site: ChaosSite, run: str, moment: Moment) -> str:
    """Cancel, then start another run that goes on from there."""
    site.set_state(run, {"type": "CANCELLING"})
    site.until_state(run, "CANCELLED", LIMIT_SECONDS)
    folder = site.run_dir(run)
    has_checkpoint = any(folder.glob("checkpoints/step-*[0-9]"))
    return site.run("chaos", resume_from=str(folder)) if has_checkpoint else site.run("chaos")


def switch_node_off(site: ChaosSite, run: str, moment: Moment) -> str:
    """End all processes of a node; there is one to spare."""
    site.nodes.kill(moment.lines % len(site.nodes.names))
    return run


def kill_head(site: ChaosSite, run: str, moment: Moment) -> str:
    """Kill the Ray head, which a service manager starts again with its nodes once the run has gone on for a while."""
    site.nodes.kill_head()
    time.sleep(moment.away)
    site.nodes.mend()
    return run


def cut_link(site: ChaosSite, run: str, moment: Moment) -> str:
    """Pull the cable of a node."""
    site.nodes.cut(moment.lines % len(site.nodes.names))
    return run


def slow_link(site: ChaosSite, run: str, moment: Moment) -> str:
    """Let a node send 2 Mbit/s for the rest of the run."""
    site.nodes.slow(moment.lines % len(site.nodes.names), "2mbit")
    return run


Victims = Mapping[str, Callable[[ChaosSite, str, Moment], str]]
LOCAL_VICTIMS: Victims = {
    "rank": signal_one("rank", signal.SIGKILL),
    "fork server": signal_one("fork server", signal.SIGKILL),
    "controller": signal_one("controller", signal.SIGKILL),
    "keeper": signal_one("keeper", signal.SIGKILL),
    "worker": kill_worker,
    "server": lose_server,
    "disk": fill_disk,
    "frozen rank": signal_one("rank", signal.SIGSTOP),
    "SIGTERM": signal_one("controller", signal.SIGTERM),
    "suspend": suspend_and_resume,
    "cancel": cancel_and_resume,
}
"""What is harmed, and how; each returns the flow run that goes on."""
NODE_VICTIMS: Victims = {"node": switch_node_off, "head": kill_head, "cut link": cut_link, "slow link": slow_link}
VICTIMS_OF: Mapping[str, Victims] = {"local": LOCAL_VICTIMS, "ray": {**LOCAL_VICTIMS, **NODE_VICTIMS}}


if __name__ == "__main__":
    main()
