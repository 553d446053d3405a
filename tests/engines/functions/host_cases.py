"""Functions and rows that tests of host functions share."""

from pathlib import Path

from prefect_rlhf.engines.functions.function import HostFunction, HostSettings

FOLDER = Path(__file__).parent
QUICK = HostSettings(workers=2, deadline_seconds=1.0, retries=1, most_failed=1.0)


def function(name, signature="row", module=None):
    """A function of the file that has those of its signature."""
    file = FOLDER / f"{module or ('of_a_person' if signature == 'row' else f'of_{signature}')}.py"
    return HostFunction(name, f"{file}:{name}", signature=signature)


def row(response, **columns):
    return {"prompt": "say it", "response": response, "ground_truth": None} | columns


def line_of(name, file="of_a_person.py", below=0):
    """Where a function of theirs is defined, as errors say it, or a line below."""
    lines = (FOLDER / file).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.removeprefix("async ").startswith(f"def {name}("))
    return f"{FOLDER / file}:{number + below} in {name}"
