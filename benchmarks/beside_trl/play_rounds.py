"""The same rows played twice, each row by itself and then all rows in rounds; prints the seconds of each as JSON.

Turns end at a word, so their lengths differ, as those of real turns do. Both calls draw the same random numbers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.beside_trl.our_play import flow_parameters
from benchmarks.beside_trl.play_work import PlayWork
from benchmarks.beside_trl.step_work import Measured
from benchmarks.demo.outcome import read_metrics
from prefect_rlhf import GRPO, Model, Prompts, computations, compute, generate, losses, rlhf_flow, train_step
from prefect_rlhf.flows.commands import cli
from prefect_rlhf.rewards import Play
from prefect_rlhf.tasks.running.journal import read_spans

TOOL_SECONDS = 0.05
STOP = [",", ".", " the", " a"]
MOST_OF_A_TURN = 48


@rlhf_flow("play-rounds")
def play_rounds(prompts: Prompts, actor: Model, play: Play, algo: GRPO) -> None:
    """Play the rows of a step by themselves, and again in rounds; train on the first."""
    size, samples = algo.batch_size, algo.samples_per_prompt
    by_row = generate(
        actor, prompts, batch_size=size, samples=samples, sampling=algo.sampling, play=play, name="by_row"
    )
    in_rounds = play.model_copy(update={"together": True})
    generate(
        actor,
        prompts,
        batch_size=size,
        samples=samples,
        sampling=algo.sampling,
        play=in_rounds,
        name="in_rounds",
        draws="by_row",
    )
    advantages = compute(computations.grpo_advantages, by_row, by_row, settings=algo)
    train_step(actor, losses.grpo(algo).on(by_row, advantages), optimizer=algo.optimizer)


def main(work: PlayWork) -> Measured:
    """Run the flow; return medians over the steps after the first."""
    work = replace(work, tool_seconds=(TOOL_SECONDS,), response_tokens=MOST_OF_A_TURN)
    with tempfile.TemporaryDirectory() as folder:
        given = flow_parameters(work, Path(folder))
        del given["held_out"], given["algo"]["evaluate_every"]
        given["algo"]["sampling"] |= {"stop": STOP}
        file = Path(folder) / "parameters.json"
        file.write_text(json.dumps(given))
        flow = f"{Path(__file__).resolve()}:play_rounds"
        status = cli.main(["run", flow, "--parameters", str(file), "--devices", str(work.threads)])
        if status:
            sys.exit(status)
        return measured(Path(folder) / "latest")


def measured(run_dir: Path) -> Measured:
    """Return the seconds of both calls, and the tokens and turns of a row."""
    seconds: dict[str, Any] = {"by_row": [], "in_rounds": []}
    for span in read_spans(run_dir):
        if span.step > 1 and span.call in seconds:
            seconds[span.call].append(span.end - span.start)
    by_call = {name: median(values) for name, values in seconds.items()}
    last = read_metrics(run_dir)[-1]
    named = ("by_row.own_tokens", "by_row.turns", "in_rounds.own_tokens", "in_rounds.turns")
    return Measured(sum(by_call.values()), by_call, {name: last[name] for name in named})


if __name__ == "__main__":
    print(json.dumps(asdict(main(PlayWork(**json.loads(sys.argv[1]))))))
