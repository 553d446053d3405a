"""The command `prefect-rlhf`: its sub-commands, and its error messages."""

import gc
import os
import select
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType

from cyclopts import App, CycloptsError

from prefect_rlhf.errors.errors import InvalidInput, NoClusterFits, NoClusterSuffices, PlanDoesNotFit, RlhfError
from prefect_rlhf.flows.algorithm.places import algorithm_places, meant_algorithm
from prefect_rlhf.flows.commands.flags import PROGRAM, app_of, closest_names, explained, print_error
from prefect_rlhf.flows.commands.guesses import meant_word
from prefect_rlhf.flows.hardware.installed_engines import ENGINES, missing_engine

NEW_OBJECTS = 50_000
"""Python looks for garbage after as many. After 700, its default, imports would take a tenth longer."""
INTERRUPT_STATUS = 130  # a shell's status after Ctrl-C
CLOSED_STATUS = 141  # a shell's status of a program whose reader, such as `head`, has read enough
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": "Train with an algorithm on this machine's devices; --dry-run checks everything without using a device.",
        "runs": "List the runs below a folder: state, steps, parameters that differ, metrics.",
        "evaluate": "Measure a model on sets of prompts, alone or against another model, with intervals.",
        "chat": "Talk with a trained model.",
        "plan": "Plan for a cluster you need not have: placement, step time, memory.",
        "profile": "Measure a model's layers on this machine's devices, for plans and predictions.",
        "doctor": "Check this host: versions, driver, memory, and each engine on its devices.",
        "graph": "Draw an algorithm's calls and how they depend on each other.",
        "nodes": "Start a cluster of machines by hand, or list its nodes.",
        "translate": "Turn your TRL, verl or OpenRLHF configuration into a parameter file; explains each option.",
        "init": "Create a project folder: prefect.yaml, a starter algorithm, its parameters.",
    }
)
HELP = """RLHF training as a Prefect plugin.

prefect-rlhf COMMAND --help lists the flags of a command. prefect-rlhf ppo is short for prefect-rlhf run ppo."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status. Mistakes get a single line on stderr.

    If no plan fits or suffices, a table follows: memory use and remedies, or the clusters. A reader that has read
    enough, such as `head`, ends the command without a word.
    """
    if arguments is None:  # a process of its own
        gc.set_threshold(NEW_OBJECTS)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it warns of a missing torch, which only runs need
    try:
        status = run_words(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, so that a closed pipe is met below and not when Python ends
        return status
    except BrokenPipeError:
        if not _drop_output_nobody_reads():
            raise
        return CLOSED_STATUS
    except CycloptsError as error:
        print_error(f"{PROGRAM}: {explained(error)}")
    except (NoClusterFits, NoClusterSuffices, PlanDoesNotFit) as error:
        print_error(f"{PROGRAM}: {error}\n{error.report}")
    except RlhfError as error:
        print_error(f"{PROGRAM}: {error}")
    except ModuleNotFoundError as error:
        engine = (error.name or "").partition(".")[0]
        if engine not in ENGINES:
            raise
        print_error(f"{PROGRAM}: {missing_engine(engine)}")
    except KeyboardInterrupt as interrupt:
        print_error(f"{PROGRAM}: {str(interrupt) or 'stopped'}")
        return INTERRUPT_STATUS
    return 2


def _drop_output_nobody_reads() -> bool:
    """Whether nobody reads standard output any more; then what is left of it goes nowhere."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # a pipe without a reader is an error, which is reported unasked
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True


def run_words(words: list[str]) -> int:
    """Run the command that the first word names; `run` is implied if that word is an algorithm or a flag of `run`."""
    if not words or words[0] in ("--help", "-h", "--version"):
        front_page()(words)
        return 0 if words else 2
    command = words.pop(0) if words[0] in COMMANDS else "run"
    if command == "run" and words and not words[0].startswith("-"):
        check_algorithm(words[0])
    module = import_module(f"prefect_rlhf.flows.commands.{command}")  # only this module: a plan needs less than a run
    status: int | None = app_of(getattr(module, command))(words)
    return status or 0  # None after --help


def front_page() -> App:
    """Return the app that prints all commands, or the version."""
    page = App(name=PROGRAM, help=HELP, help_format="plaintext", version=version(PROGRAM), result_action="return_value")
    for place, (name, summary) in enumerate(COMMANDS.items()):
        page.command(App(name=name, help=summary, sort_key=place))
    return page


def check_algorithm(word: str) -> None:
    """Raise InvalidInput for a word that is neither an algorithm nor a command; the error suggests what you meant."""
    if ":" not in word and word not in (places := algorithm_places()):
        known = f"a command ({', '.join(COMMANDS)}) or an algorithm ({', '.join(places)}, or file.py:function)"
        near = meant_algorithm(word) if word.endswith(".py") else closest_names(word.lower(), (*COMMANDS, *places))
        meant = meant_word(word) or near
        raise InvalidInput("algorithm", word, known + meant)
