"""The command `prefect-rlhf translate`: a file of TRL, verl or OpenRLHF becomes a parameter file."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from pydantic import ValidationError

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.flows.commands.flags import ALL_AT_ONCE, PROGRAM, whole_number
from prefect_rlhf.flows.forms.check import invalid_input
from prefect_rlhf.flows.forms.dictionary.job import Job
from prefect_rlhf.flows.forms.dictionary.reading import read_dialect, read_source
from prefect_rlhf.flows.forms.dictionary.settings_here import SETTINGS
from prefect_rlhf.flows.forms.dictionary.translation import Translation, translation
from prefect_rlhf.flows.forms.dictionary.written import parameter_file, table
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES

MOST_ROWS = 10**12
NEXT = "next: {program} run {flow} --parameters {out}{devices} --dry-run"


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslateFlags:
    """The flags of `translate`."""

    file: Annotated[
        Path, Parameter(help="YAML or JSON of the options, or a shell script that passes them to the library.")
    ] = field(kw_only=False)
    from_: Annotated[
        Literal["trl", "verl", "openrlhf"] | None,
        Parameter(name="--from", help="The library; default: whichever has these options."),
    ] = None
    algorithm: Annotated[
        str | None, Parameter(help="The library's trainer, such as grpo or dpo; default: whichever has these options.")
    ] = None
    out: Annotated[Path, Parameter(help="The parameter file to write; an existing file is not overwritten.")] = Path(
        "parameters.yaml"
    )
    devices: Annotated[
        int | None,
        whole_number(1, MOST_DEVICES),
        Parameter(help="How many devices the library ran on: TRL multiplies its batch by them.", show_default=False),
    ] = None
    rows: Annotated[
        int | None,
        whole_number(1, MOST_ROWS),
        Parameter(help="How many rows the dataset has, for options given as a share of the run.", show_default=False),
    ] = None


def translate(flags: Annotated[TranslateFlags, ALL_AT_ONCE]) -> int:
    """Translate the options of TRL, verl or OpenRLHF into a parameter file.

    It prints what becomes of each option, and which of the library's defaults
    differ from ours:

      prefect-rlhf translate grpo.yaml --devices 8 --out parameters.yaml
      prefect-rlhf translate run_qwen2-7b.sh --from verl
    """
    if flags.out.exists() or flags.out.is_symlink():
        raise InvalidInput("--out", str(flags.out), "a file that does not exist: no file is overwritten")
    dialect, options = read_dialect(read_source(flags.file), flags.from_, flags.algorithm)
    found = translation(Job.of(dialect, options, flags.devices or 1, flags.rows))
    text = parameter_file(found, flags.file.name)
    write_atomically(flags.out, partial(Path.write_text, data=text))
    print(table(found, flags.file.name))
    if (problem := _problem(found)) is not None:
        print(f"\nto mend: {problem}")
    if found.assumes_devices and flags.devices is None:
        print("\nassumed: 1 device; state --devices for another number")
    devices = _devices_flag(found.job, flags.devices)
    line = NEXT.format(program=PROGRAM, flow=found.job.flow, out=flags.out, devices=devices)
    print(f"\nwrote {flags.out}", line, sep="\n")
    return 0


def _devices_flag(job: Job, stated: int | None) -> str:
    """Return a flag with the run's number of devices there, if it has several on one machine: a run here has one."""
    is_single = job.stated.get("trainer.nnodes", 1) == 1
    devices = stated or (job.stated.get("trainer.n_gpus_per_node") if is_single else None)
    return f" --devices {devices}" if isinstance(devices, int) and devices > 1 else ""


def _problem(found: Translation) -> InvalidInput | None:
    """Return why the settings together are refused, if they are: each of them alone is accepted."""
    kind, algo = SETTINGS[found.job.flow], found.parameters.get("algo", {})
    try:
        kind.model_validate(algo, strict=False)
    except ValidationError as error:
        return invalid_input("algo", error, algo, kind)
    return None
