"""What each search and pass of the planner gains: answers with one of them off, beside the answers with all.

    python -m benchmarks.planner.ablation [--only 1,11,...] [--evaluations N] [--parts 'presets,fewest cuts']

Every answer has the same evaluations, and those of a part that is off go to no other part. The answer without a part
comes from a fork of the process that answers with all parts, at the moment when the part first does something. So both
have the same caches until then, and the same work. A part that does nothing for a question changes nothing.

A line for each question and part is JSON. `change` is the share by which the `seconds` of the answer, those of the
`fastest` plan found and the `bound` are larger without the part; null if no plan is found. `inside` are the processor
seconds in the part, 0 if the part is not a function. The last line is JSON: `questions`, `evaluations`,
`processor_seconds` of the answers with all parts, and `parts`. By part these are the questions on which it `acted`,
those without a plan (`no_plan`), the mean change and the largest of `seconds` and of `fastest`, the largest fall of the
bound, and `inside`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import islice
from math import comb
from multiprocessing.connection import Connection
from statistics import fmean
from types import ModuleType
from typing import Any

from benchmarks.planner.referee import asked, questions
from prefect_rlhf.errors.errors import TooLittleMemory
from prefect_rlhf.placement.planner import attempts, best_plan, neighbours, question, solution
from prefect_rlhf.placement.planner.space import candidates, plan_problem
from prefect_rlhf.placement.search.driver import Proof, warm_up
from prefect_rlhf.placement.search.exact import exact, neighbourhood
from prefect_rlhf.placement.search.sampling.annealing import AnnealingState
from prefect_rlhf.placement.search.sampling.random_moves import PROPOSALS_A_STEP
from prefect_rlhf.placement.search.tables import tables

QUESTIONS = (1, 11, 40, 3, 39, 5)
"""Numbers of questions in `questions.txt`: PPO, ReMax, tiny batches, two nodes, two kinds of nodes, staleness."""
WARMING, WARMING_EVALUATIONS = 17, 2_000.0  # the question that is answered first, and discarded
EVALUATIONS = 100_000.0
MUCH = 1 << 60  # bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A name of `module`, and the value it has while the part is off: a function, unless `is_value`.

    `spends`: the part changes the answer also where its result is that of `off`, since it spends evaluations.
    """

    module: ModuleType
    name: str
    off: Any
    is_value: bool = False
    spends: bool = False


NO_CHANGE = dict.fromkeys(("seconds", "fastest", "bound"), 0.0)


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer with all parts, and without each part that did something; None if no plan was found.

    An answer has the `seconds` of an iteration, those of the `fastest` plan that was found, and the `bound`.
    """

    answer: Mapping[str, float]
    without: Mapping[str, Mapping[str, float] | None]
    processor_seconds: float
    inside: Mapping[str, float]

    def change(self, name: str) -> dict[str, float] | None:
        """Return by which share each number is larger without a part; None if no plan is found."""
        other = self.without.get(name, self.answer)
        return None if other is None else {key: other[key] / value - 1 for key, value in self.answer.items()}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question's line, and the length of the search."""

    line: str
    evaluations: float

    def found(self) -> dict[str, float] | None:
        """Return the answer's seconds, those of the fastest plan, and the bound; None if no plan was found."""
        try:
            found = best_plan.plan_graph(asked(self.line), evaluations=self.evaluations)
        except TooLittleMemory:
            return None
        return {"seconds": found.seconds, "fastest": found.fastest_seconds, "bound": found.lower_bound_seconds}


@dataclass
class Branches:
    """The forks of a process that answers, a fork for each part that is off in it; in a fork, the way to its parent."""

    inside: dict[str, float]
    without: dict[str, dict[str, float] | None] = field(default_factory=dict)
    to_parent: Connection | None = None

    def branch(self, name: str) -> bool:
        """Fork, switch a part off in the fork, wait for its answer, and return whether this is the fork."""
        receiver, sender = multiprocessing.Pipe(duplex=False)
        fork = os.fork()
        if fork == 0:
            self.to_parent = sender
            _put(PARTS[name], PARTS[name].off)
            return True
        sender.close()
        self.without[name] = receiver.recv()
        os.waitpid(fork, 0)
        return False


def main() -> None:
    """Print a line for each question and part, and the sums."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default=",".join(map(str, QUESTIONS)), help="numbers of questions, from 1 on")
    flags.add_argument("--evaluations", type=float, default=EVALUATIONS, help="length of the search for each answer")
    flags.add_argument("--parts", default=",".join(PARTS), help="the parts to switch off")
    arguments = flags.parse_args()
    chosen = [name for name in arguments.parts.split(",") if name]
    if unknown := set(chosen) - set(PARTS):
        flags.error(f"--parts: got {', '.join(sorted(unknown))}, expected names from {', '.join(PARTS)}")
    lines = [questions()[int(number) - 1] for number in arguments.only.split(",")]
    warm_up("exact")
    best_plan.plan_graph(asked(questions()[WARMING - 1]), evaluations=WARMING_EVALUATIONS)
    judged = []
    for line in lines:
        judged.append(answered(line, arguments.evaluations, chosen))
        for name in chosen:
            change, inside = judged[-1].change(name), judged[-1].inside[name]
            print(json.dumps({"question": line, "off": name, "change": change, "inside": inside}), flush=True)
    spent = sum(each.processor_seconds for each in judged)
    sums = {"questions": len(lines), "evaluations": arguments.evaluations, "processor_seconds": spent}
    print(json.dumps(sums | {"parts": {name: summary(name, judged) for name in chosen}}))


def summary(name: str, judged: Sequence[Judged]) -> dict[str, Any]:
    """Return the sums of a part."""
    changes = [each.change(name) for each in judged]
    known = [change for change in changes if change is not None] or [NO_CHANGE]
    return {
        "acted": sum(name in each.without for each in judged),
        "no_plan": changes.count(None),
        "mean_seconds": fmean(change["seconds"] for change in known),
        "most_seconds": max(change["seconds"] for change in known),
        "mean_fastest": fmean(change["fastest"] for change in known),
        "most_fastest": max(change["fastest"] for change in known),
        "bound": min(change["bound"] for change in known),
        "inside": sum(each.inside[name] for each in judged),
    }


def answered(line: str, evaluations: float, names: Sequence[str]) -> Judged:
    """Return the answers to a question from a process of its own, and its forks."""
    forks = multiprocessing.get_context("fork")
    receiver, sender = forks.Pipe(duplex=False)
    process = forks.Process(target=_answer, args=(line, evaluations, names, sender))
    process.start()
    sender.close()  # so that the end of the process ends the wait
    judged: Judged = receiver.recv()
    process.join()
    return judged


def _answer(line: str, evaluations: float, names: Sequence[str], sender: Connection) -> None:
    """Answer with all parts on, and in a fork of the process for each part that acts, with it off."""
    answer, branches = Asked(line, evaluations), Branches(dict.fromkeys(names, 0.0))
    for name in names:
        if PARTS[name].is_value:
            branches.branch(name)
        else:
            _watch(name, branches)
    began = time.process_time()
    found = answer.found()
    if branches.to_parent is not None:
        branches.to_parent.send(found)
        os._exit(0)  # without what the end of the parent's own process would do
    took = time.process_time() - began
    assert found is not None, f"{line}: no plan with {evaluations:g} evaluations"
    sender.send(Judged(found, branches.without, took, branches.inside))


def _watch(name: str, branches: Branches) -> None:
    """Fork where the part first returns anything else than it does while off, or at its first call."""
    part = PARTS[name]
    function = getattr(part.module, part.name)

    @wraps(function)
    def watched(*arguments: Any, **keywords: Any) -> Any:
        if branches.to_parent is not None:  # another part is off
            return function(*arguments, **keywords)
        if part.spends and name not in branches.without and branches.branch(name):
            return part.off(*arguments, **keywords)
        began = time.process_time()
        result = function(*arguments, **keywords)
        branches.inside[name] += time.process_time() - began
        if name not in branches.without and result != (without := part.off(*arguments, **keywords)):
            return without if branches.branch(name) else result
        return result

    _put(part, watched)


def _put(part: Part, value: Any) -> None:
    before = getattr(part.module, part.name)
    setattr(part.module, part.name, value)
    if part.module is attempts:  # its list of attempts holds the function itself
        attempts.ATTEMPTS = tuple(replace(a, make=value) if a.make is before else a for a in attempts.ATTEMPTS)  # type: ignore[assignment]


def _attempt(name: str) -> Part:
    return Part(attempts, name, lambda request: attempts.Finding())


def _pass(module: ModuleType, name: str, spends: bool = False) -> Part:
    """A function that returns a plan, given a question and a plan, or its module's other order of these."""
    return Part(module, name, lambda asked, plan, *others: plan, spends=spends)


def _without_plans(whole: Callable[[attempts.SearchRequest], attempts.Finding]) -> Part:
    return Part(attempts, whole.__name__, lambda request: replace(whole(request), plans=()), spends=True)


def _without_proof(prove: Callable[..., Proof]) -> Callable[..., Proof]:
    return lambda request, budget, *others: prove(request, None, *others)


def _first_start(starts: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: starts(*arguments)[:1]


def _first_cache(caches: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: islice(caches(*arguments), 1)


def _few_options(options: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: options(*arguments)[:1]


def _no_fullest(option: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: replace(option(*arguments), fullest_bytes=0)


def _always_room(option: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: replace(option(*arguments), loaded_bytes=0)


def _idle_annealing(tables_: tables.Tables, state: AnnealingState) -> AnnealingState:
    return replace(state, evaluations=state.evaluations + PROPOSALS_A_STEP)


def _idle_neighbourhood(
    tables_: tables.Tables, state: neighbourhood.Neighbourhoods
) -> neighbourhood.Neighbourhoods | None:
    sets = sum(comb(tables_.num_calls, size) for size in range(2, neighbourhood.MOST_FREE + 1))
    spent = state.evaluations + neighbourhood.MOST_EVALUATIONS
    return None if state.number >= sets else replace(state, number=state.number + 1, evaluations=spent)


PARTS = {
    "plans of the whole space": _without_plans(attempts.search_whole_space),
    "copies": _attempt("search_copies"),
    "presets": _attempt("search_presets"),
    "plan of the least bound": _attempt("search_least_bound"),
    "fullest devices": _attempt("search_fullest_devices"),
    "divisions": _attempt("search_divisions"),
    "time sharing": _attempt("search_time_sharing"),
    "proof of the bound": Part(best_plan, "prove_bound", _without_proof(best_plan.prove_bound)),
    "start without staleness": Part(best_plan, "_without_staleness", lambda request: []),
    "local search of calls": _pass(neighbours, "_improve_once", spends=True),
    "role moves": _pass(neighbours, "_improve_together", spends=True),
    "several starts": Part(best_plan, "_starts", _first_start(best_plan._starts)),
    "searches for steady plans": Part(best_plan, "_steady", lambda *arguments: []),
    "resident copies": _pass(best_plan, "keep_resident_where_free"),
    "places of computations": _pass(best_plan, "_place_computations"),
    "fewest cuts": _pass(best_plan, "with_fewest_cuts"),
    "least recomputation": _pass(best_plan, "with_least_recomputation"),
    "streamed parts": _pass(best_plan, "with_streamed_parts"),
    "simplest plan": Part(best_plan, "simplest", lambda asked, space, fastest, *others: fastest),
    "repairs": Part(solution, "repaired", lambda asked, plan: None),
    "late reloads": Part(solution, "with_prefetch", lambda asked, plan, prefetch: plan),
    "device orders of searches": Part(question, "aligned", lambda plan, graph: plan),
    "device orders of neighbours": Part(neighbours, "aligned", lambda plan, graph: plan),
    "annealing": Part(exact, "step_annealing", _idle_annealing, is_value=True),
    "neighbourhoods": Part(exact, "step_neighbourhood", _idle_neighbourhood, is_value=True),
    "symmetry": Part(tables, "symmetries", lambda problem: [tuple(range(len(problem.calls)))]),
    "bytes of fullest devices": Part(plan_problem, "_option", _no_fullest(plan_problem._option), is_value=True),
    "rooms of visits": Part(plan_problem, "_option", _always_room(plan_problem._option), is_value=True),
    "rooms of copies": Part(plan_problem, "_room_for_copies", lambda mesh, context: MUCH),
    "certain transfers": Part(plan_problem, "surely_fed", lambda call, candidate, graph: False),
    "recomputation": Part(
        candidates, "_with_recomputation", _few_options(candidates._with_recomputation), is_value=True
    ),
    "sequence parallelism": Part(candidates, "searched", lambda call, plain, graph: iter((plain,)), is_value=True),
    "offloaded copies": Part(candidates, "_offloaded", lambda *arguments: iter(()), is_value=True),
    "smaller caches": Part(candidates, "_caches", _first_cache(candidates._caches), is_value=True),
}
"""By name in words. Two parts of a search are functions inside compiled functions, and cannot be switched off here:
the exclusion of sizes of meshes (`domains`), and options that a bound skips (`is_promising`)."""

if __name__ == "__main__":
    main()
