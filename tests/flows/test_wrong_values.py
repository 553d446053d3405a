"""Wrong values of every parameter there is: each is refused in one line, by the form's schema where it can know it.

The fields are found by reflection, so a new one is tested as soon as it is there.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import walk_packages
from tempfile import NamedTemporaryFile
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect.utilities.schema_tools.validation import is_valid
from pydantic import BaseModel, TypeAdapter, ValidationError

import prefect_rlhf
from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.blocks.worker.worker import GpuMeshWorker
from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.flows.algorithm.places import ALGORITHMS
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow, rlhf_flow
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.plan import plan
from prefect_rlhf.flows.profile import profile
from prefect_rlhf.tasks.settings import Settings
from tests.support.cases import examples, first
from tests.support.tiny import ppo_parameters

FLOWS = {name: find_flow(name) for name in ALGORITHMS} | {"plan": plan}
CPU_SECONDS, GROWTH_BYTES = 10, 2 << 30  # that the refusal of one value may take
PLACES = {"path": "there"}


def models() -> list[type[BaseModel]]:
    """Every pydantic model of the package that a person fills in, by import of all of it."""
    for module in walk_packages(prefect_rlhf.__path__, "prefect_rlhf."):
        if module.name.split(".")[1] in ("flows", "tasks", "blocks", "placement"):
            import_module(module.name)
    found, waiting = {}, [BaseModel]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("prefect_rlhf."):
            found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return [found[name] for name in sorted(found)]


def numbers(annotation: Any, metadata: tuple[Any, ...] = ()) -> list[tuple[type, tuple[Any, ...]]]:
    """The numbers within a type, each with what was said of it."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return numbers(inner, (*metadata, *(part for one in more for part in getattr(one, "metadata", [one]))))
    if annotation in (int, float):
        return [(annotation, metadata)]
    above = (
        metadata if get_origin(annotation) in (Union, UnionType) else ()
    )  # what is said of a list is not of its items
    return [number for part in get_args(annotation) for number in numbers(part, above)]


OWN_FIELDS = [
    (f"{kind.__name__}.{name}", field)
    for kind in models()
    for name, field in kind.model_fields.items()
    if any(name in getattr(base, "__annotations__", {}) for base in kind.__mro__ if base.__module__.startswith("prefect_rlhf"))
]  # fmt: skip


@pytest.mark.parametrize(("name", "field"), OWN_FIELDS, ids=[name for name, _ in OWN_FIELDS])
def test_every_number_has_bounds(name, field):
    """On both sides, within what a server, a browser and an engine can hold."""
    for kind, metadata in numbers(field.annotation, tuple(field.metadata)):
        assert any(hasattr(one, "ge") or hasattr(one, "gt") for one in metadata), f"{name} may be as low as it likes"
        assert any(hasattr(one, "le") or hasattr(one, "lt") for one in metadata), f"{name} may be as high as it likes"
        adapter = TypeAdapter(Annotated[kind, *metadata])
        for value in (math.nan, math.inf, -math.inf, 2**64, -(2**64), 1e300):
            with pytest.raises(ValidationError):
                adapter.validate_python(value)


BREAKING = ("\ud800", "a\0b", 2**64, -(2**64))
"""Values that a server stores, and then fails at every list with them; PostgreSQL does not even store NUL."""


def wrapped(value):
    """A value itself, and in lists and groups."""
    return [value, [value], {"a": value}, {"a": [{"b": value}]}, *([{value: 1}] if isinstance(value, str) else [])]


class Own(Settings):
    """Settings of an author who thought of no bounds."""

    times: int = 3
    weights: list[float] | None = None
    names: dict[str, tuple[str, ...]] = {}
    anything: Any = None


OWN = Own()


@rlhf_flow("own")
def own(prompts: Prompts, actor: Model, own: Own = OWN, note: str = "") -> None:
    """Never run."""


@pytest.mark.parametrize("flow", first(2, [own, profile, *FLOWS.values()]), ids=lambda flow: flow.fn.__name__)
def test_no_value_of_a_form_breaks_a_server(flow):
    """Wherever the value is: in a field, a list, a group or a key. The deployment's schema lets the server refuse it."""
    schema = flow.parameters.model_dump()
    groups = {"": schema["properties"]} | {
        k: v["properties"] for k, v in schema["definitions"].items() if "properties" in v
    }
    for field in (field for properties in groups.values() for field in properties.values()):
        alone = {"type": "object", "properties": {"x": field}, "definitions": schema["definitions"]}
        assert [value for bad in BREAKING for value in wrapped(bad) if is_valid({"x": value}, alone)] == [], field


def test_a_form_takes_ordinary_texts_and_numbers():
    """Emoji, line ends and groups within groups."""
    schema = own.parameters.model_dump()
    given = {"prompts": {"path": "p"}, "actor": {"path": "m"}, "note": "a 🎬\n b"}
    anything = {"a": [1, {"b": {"c": [0.5, None, True, "é"]}}]}
    assert is_valid(given | {"own": {"times": 2**62, "names": {"🎬": ["x"]}, "anything": anything}}, schema)
    form = plan.parameters.model_dump()
    assert is_valid({"parameters": {"algo": {"update": {"epochs": 2}, "x": [0.9, 0.5]}, "plan": "auto"}}, form)


def test_no_job_variable_breaks_a_server():
    """Nor a name that the form lacks: the server keeps it too."""
    schema = GpuMeshWorker.get_default_base_job_template()["variables"]
    for name in (*schema["properties"], "env.NAME"):
        assert [value for bad in BREAKING for value in wrapped(bad) if is_valid({name: value}, schema)] == [], name
    assert not is_valid({"\ud800": 1}, schema)
    assert is_valid({"num_devices": 2, "env": {"NAME": "x", "GONE": None}, "env.NAME": "y"}, schema)


@dataclass(frozen=True)
class Leaf:
    """A parameter of a flow, or a field within one, as the schema of a deployment has it."""

    flow: str
    path: tuple[str, ...]
    schema: str

    def __str__(self) -> str:
        return f"{self.flow}:{'.'.join(self.path)}"


def leaves(flow: str) -> list[Leaf]:
    """All parameters of a flow that are no group, and those of its groups."""
    schema = FLOWS[flow].parameters.model_dump()

    def within(part: dict[str, Any], path: tuple[str, ...]) -> list[Leaf]:
        if "$ref" in part:
            part = schema["definitions"][part["$ref"].rpartition("/")[2]] | {"default": part.get("default")}
        if "allOf" in part:
            return within(part["allOf"][0], path)
        if "properties" in part:
            return [leaf for name, inner in part["properties"].items() for leaf in within(inner, (*path, name))]
        return [Leaf(flow, path, json.dumps(part))]

    return within(schema, ())


LEAVES = [leaf for flow in FLOWS for leaf in leaves(flow)]
NUMBERS_ELSEWHERE = [True, False, "1", "5", "1_000", 10**30, -(10**30), 2**64, 1e308, [], [1], {}]
NUMBERS_ELSEWHERE += [math.nan, math.inf, -math.inf]
OTHERWISE = {
    "integer": [0.5, 1.5, -1, *NUMBERS_ELSEWHERE],
    "number": [-1.0, -1e-9, "0x10", *NUMBERS_ELSEWHERE],
    "boolean": [0, 1, "yes", "true", [], {}, 0.0, "1"],
    "string": [0, 1.5, True, [], {}, ["a"], "\ud800", "x" * 10_000],
    "array": ["", 1, True, {"a": 1}, "ab", [[]], [math.nan, 0.5], [2, 3], [-1, 0.9], [0.9], [None]],
    "object": ["", 1, True, [1], [[]]],
}


def wrong_values(leaf: Leaf) -> list[Any]:
    """Values that no such field can take: of other types, out of its bounds, none of its words."""
    schema = json.loads(leaf.schema)
    options = schema.get("anyOf", [schema])
    kinds = {option.get("type") for option in options}
    wrong = [value for kind in kinds - {"null"} for value in OTHERWISE.get(kind, [])]
    for option in options:
        if {"enum", "const"} & set(option):
            wrong += ["", "none of these", *OTHERWISE["string"]]
        for bound, beyond in (("maximum", 1), ("minimum", -1), ("exclusiveMaximum", 0), ("exclusiveMinimum", 0)):
            if bound in option:
                wrong.append(
                    option[bound] + beyond * (1 if option["type"] == "integer" else 1e-3 * max(1, abs(option[bound])))
                )
    if "null" not in kinds:
        wrong.append(None)
    return [value for value in wrong if not right(value, options)]


def right(value: Any, options: list[dict[str, Any]]) -> bool:
    """Whether a value that was drawn for one part of a union suits another, or lies within the bounds after all."""
    return any(suits(value, option) for option in options)


def suits(value: Any, option: dict[str, Any]) -> bool:
    """Whether a value is what one part of a schema asks for."""
    kind = option.get("type")
    if "const" in option or "enum" in option:
        return value in option.get("enum", [option.get("const")])
    if kind in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, int | float) or (kind == "integer" and value != value // 1):
            return False
        inside = option.get("minimum", -math.inf) <= value <= option.get("maximum", math.inf)
        return inside and option.get("exclusiveMinimum", -math.inf) < value < option.get("exclusiveMaximum", math.inf)
    if kind == "string":
        shortest, longest = option.get("minLength", 0), option.get("maxLength", math.inf)
        return isinstance(value, str) and value.isprintable() and shortest <= len(value) <= longest
    if kind == "array":
        is_list = isinstance(value, list) and len(value) >= option.get("minItems", 0)
        return is_list and all(suits(one, option.get("items", {})) for one in value)
    return kind == "object" and value == {}


def parameters_with(leaf: Leaf, value: Any) -> dict[str, Any]:
    """Parameters that a flow takes, but for one value."""
    flow = FLOWS[leaf.flow]
    required = flow.parameters.model_dump().get("required") or []
    values: dict[str, Any] = {name: dict(PLACES) for name in required}
    place = values
    for name in leaf.path[:-1]:
        place = place.setdefault(name, dict(PLACES) if name in required else {})
    place[leaf.path[-1]] = value
    return values


@contextmanager
def within_limits():
    """Fails when the body takes 10 s of processor time, however busy the machine is, or 2 GiB of memory."""

    def late(number, frame):
        raise AssertionError(f"it took more than {CPU_SECONDS} s")

    before = signal.signal(signal.SIGPROF, late)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < GROWTH_BYTES >> 10


def assert_one_line(error: RlhfError, *names: str) -> None:
    text = str(error)
    assert len(text.splitlines()) == 1 and len(text) < 1100, text[:2000]
    assert all(name in text for name in names), text


def test_the_unchanged_parameters_are_accepted():
    for name, flow in FLOWS.items():
        required = flow.parameters.model_dump().get("required") or []
        flow.validate_parameters({field: dict(PLACES) for field in required})
        assert any(leaf.flow == name for leaf in LEAVES)


def test_hundreds_of_wrong_values_are_tried():
    assert sum(len(wrong_values(leaf)) for leaf in LEAVES) > 1000


@settings(max_examples=examples(500))
@given(data=st.data())
def test_a_wrong_value_is_refused_in_one_line_that_names_its_field(data):
    leaf = data.draw(st.sampled_from(LEAVES))
    wrong = wrong_values(leaf)
    if not wrong:
        return
    values = parameters_with(leaf, data.draw(st.sampled_from(wrong)))
    with within_limits(), pytest.raises(InvalidInput) as refused:
        FLOWS[leaf.flow].validate_parameters(values)
    assert_one_line(refused.value, leaf.path[0])


@pytest.mark.parametrize(
    "leaf", [leaf for leaf in LEAVES if '"type": "integer"' in leaf.schema or '"number"' in leaf.schema], ids=str
)
def test_the_schema_itself_refuses_a_number_out_of_bounds(leaf):
    """So the UI's form, the API and `prefect deployment run` do, before a flow run is made."""
    schema = FLOWS[leaf.flow].parameters.model_dump()
    out = [value for value in (-(2**70), 2**70, -1e300, 1e300) if leaf.path[-1] != "betas"] or [[2, 3], [-1, 0.9]]
    for value in out:
        assert not is_valid(parameters_with(leaf, value), schema), value


MODELS = ["--model", "actor=llama-7b", "--model", "critic=llama-7b"]
ASK = ["plan", "ppo", *MODELS, "--budget", "0.3"]
SMALL = ["--cluster", "1x2:h100", "--prompt-length", "64", "--response-length", "64"]
FILES = {
    "broken": b"steps: {a: [",
    "latin1": "output_dir: caf\xe9".encode("latin1"),
    "binary": bytes(range(256)),
    "nested": b"[" * 20_000,
    "list": b"- steps",
    "tab": b"a:\n\tb: 1",
    "two": b"--- {}\n--- {}",
    "tag": b"steps: !!python/object/apply:os.system [ls]",
    "twice": b"steps: 1\nsteps: 2",
    "itself": b"algo: &a {b: *a}",
    "bomb": "\n".join(
        ["a: &a [x, x]", *(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghij"))]
    ).encode(),
    "large": b"# " + b"x" * (2 << 20),
    "key": b"? [a]\n: 1",
    "digits": b"steps: " + b"9" * 5000,
    "empty": b"",
    "nothing": b"{}",
}
COMMANDS = {
    **{f"parameters that are {name}": (["ppo", "--parameters", name], "") for name in FILES},
    "parameters in a folder": (["ppo", "--parameters", "."], "--parameters"),
    "parameters that are not there": (["ppo", "--parameters", "none"], "--parameters"),
    "parameters of a long name": (["ppo", "--parameters", "n" * 400], "--parameters"),
    "no parameter": (["ppo"], "actor, ref, prompts, held_out"),
    "an unknown flag": (["ppo", "--stepz", "1"], "--stepz"),
    "a flag without its value": (["ppo", "--devices"], "--devices"),
    **{f"{devices} devices": (["ppo", "--devices", devices], "--devices") for devices in ("0", "-1", "x", "1e3", "9" * 5000, "1_0", "")},
    "restarts without end": (["ppo", "--max-restarts", "inf"], "--max-restarts"),
    **{
        f"the value {value[:12]!r}": (["ppo", "-p", f"steps={value}"], "steps")
        for value in ("{a: [", "!!python/name:os.system", "\ta: 1", "--- 1\n--- 2", "[" * 20_000, "*a", "@", "%", "9" * 5000, "1_000", "0x10", "010", "1:30", "true", "'5'", "1.0", ".nan", ".inf", "1e400", "[1]", "{}", "", "\x00", "2026-11-22")
    },
    "a value of no name": (["ppo", "-p", "=1"], "NAME=VALUE"),
    "a name of no value": (["ppo", "-p", "steps"], "NAME=VALUE"),
    "a group that is none": (["ppo", "-p", "steps=1", "-p", "steps.a=1"], "steps.a"),
    "a name with a thousand dots": (["ppo", "-p", "." * 5000 + "=1"], "parameters"),
    "a name of 100,000 letters": (["ppo", "-p", "a" * 100_000 + "=1"], "parameters"),
    "half a character": (["ppo", "-p", 'output_dir="\\ud800"'], "output_dir"),
    **{
        f"the algorithm {name[:20]!r}": ([name], "algorithm")
        for name in ("", ":", "ppo:", ":ppo", "ppo:x", "a:b:c", "..:x", "1:2", "os:path", "json:dumps", "no_such", "no.such:one", "./none.py:f", "prefect_rlhf.flows.ppo:none", "x" * 10_000, "a\x00b:c", "a/b:c", "~nosuch/mine.py:f", "a\x00.py:f")
    },
    **{
        f"the cluster {text[:16]!r}": ([*ASK, *SMALL, "--cluster", text], "cluster")
        for text in ("0x1:cpu", "1x0:cpu", "999999999x8:h100", "1x999999999:h100", "9" * 5000 + "x1:cpu", "1x" + "9" * 5000 + ":cpu", "1x1", "x", "1x1:h100+", "\x00", "1x1:" + "h" * 500)
    },
    **{f"the network {text!r}": ([*ASK, *SMALL, "--cluster", "2x1:h100", "--network", text], "network") for text in ("-1", "0", "nan", "inf", "1e400", "fast", "\x00")},
    **{f"the budget {text!r}": ([*ASK, *SMALL, "--budget", text], "budget") for text in ("0", "-1", ".nan", ".inf", "1e400", "x", "[1]", "true", "'1'", "{a: [")},
    **{f"the batch {text!r}": ([*ASK, *SMALL, "--batch-size", text], "batch") for text in ("0", "-1", "1.5", "1e3", "x", "9" * 30, "true", "'8'")},
    **{f"the memory {text!r}": ([*ASK, *SMALL, "--device-memory-gib", text], "device_memory_gib") for text in ("0", "-1", ".inf", ".nan", "x", "1e9")},
    **{f"the sweep {text[:16]!r}": ([*ASK, *SMALL, "--sweep", text], "sweep") for text in ("0", "-1", "x", "1-4", "9" * 5000, "9" * 12, ",".join(["1"] * 500), "1,,2")},
    **{f"the lengths {text[:16]!r}": ([*ASK, *SMALL, "--prompt-length", text], "prompt_length") for text in ("0", "-1", "x", "1:x", "1:nan", "1:inf", "1:-1", ":", ",", "9" * 5000, "9" * 30, "a.parquet", "\x00")},
    **{f"the model {text[:16]!r}": (["plan", "ppo", *SMALL, "--model", f"actor={text}", "--model", "critic=llama-7b"], "actor") for text in ("nothing", "\x00", "a" * 400, "~nosuch/x", "/dev/null", "/proc/self")},
    **{f"the method {text!r}": ([*ASK, *SMALL, "--method", text], "method") for text in ("", "genetic", "EXACT")},
    "a profile that is none": ([*ASK, *SMALL, "--profile", "binary"], "profile"),
    "a profile that is not there": ([*ASK, *SMALL, "--profile", "nowhere.json"], "nowhere.json"),
    "a profile of a long name": ([*ASK, *SMALL, "--profile", "p" * 400], "profile"),
    **{
        f"profile with {flags[-2]} {flags[-1][:8]}": (["profile", "llama-7b", *flags, "--dry-run"], "")
        for flags in (["--devices", "0"], ["--devices", "x"], ["--rows", "0"], ["--rows", "1e9"], ["--longest", "15"], ["--longest", "9" * 30], ["--tensor-parallel", "0"], ["--tensor-parallel", "-1"], ["--tensor-parallel", "3"], ["--tensor-parallel", "x"], ["--tensor-parallel", "9" * 5000], ["--kind", "tpu"], ["--dtype", "float64"])
    },
    **{f"profile of {model[:12]!r}": (["profile", model, "--dry-run"], "") for model in ("nothing", "a" * 400, "\x00", "", "/dev/null", "~nosuch/x")},
}  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS)
def test_a_wrong_command_costs_a_line(case, capsys, tmp_path, monkeypatch):
    """Exit status 2, nothing on stdout, one line on stderr."""
    words, names = COMMANDS[case]
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHF_LEASE", raising=False)
    with within_limits():
        assert main(words) == 2
    said, line = capsys.readouterr()
    assert not said and line.startswith("prefect-rlhf: ")
    assert len(line.splitlines()) == 1 and len(line) < 1200 and names in line, line[:2000]


NOBODY = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}  # where no server answers


MEASURED = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[2:]).returncode
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
"""  # a small process in between: what starts another counts its own memory as the other's, too


def command(*words: str, **environment: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command as a person starts it, which takes no more than 2 GiB."""
    program = Path(sys.executable).with_name("prefect-rlhf")
    with NamedTemporaryFile("r") as most_kib:
        measured = [sys.executable, "-c", MEASURED, most_kib.name, program, *words]
        done = subprocess.run(measured, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        assert int(most_kib.read()) < GROWTH_BYTES >> 10
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of parameters that run."""
    folder = tmp_path_factory.mktemp("right")
    (folder / "parameters.yaml").write_text(yaml.safe_dump(ppo_parameters(folder)))
    return str(folder / "parameters.yaml")


@pytest.mark.all
def test_a_dry_run_needs_no_server(file):
    status, said, _ = command("ppo", "--parameters", file, "--devices", "2", "--dry-run", **NOBODY)
    assert status == 0
    assert "plan flattening for ppo:" in said and "no step was started" in said


@pytest.mark.slow
@pytest.mark.all
def test_without_an_answering_server_a_run_prints_one_line(file):
    status, said, line = command("ppo", "--parameters", file, "--devices", "2", **NOBODY)
    assert (status, said) == (2, "")
    assert len(line.splitlines()) == 1 and NOBODY["PREFECT_API_URL"] in line, line[-2000:]
