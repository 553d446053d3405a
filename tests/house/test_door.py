"""The public door: authors import from `prefect_rlhf` and its public modules alone, and these names stay."""

import ast
import re
import subprocess
import sys

import pytest

import prefect_rlhf
from prefect_rlhf.door import MODULES
from tests.door import FROZEN, door
from tests.house import ROOMS, ROOT, files, imported

PAGES_OF_AUTHORS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


def fresh(program):
    """What a fresh interpreter prints."""
    words = [sys.executable, "-c", program]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout.split()


def test_importing_the_package_loads_nothing_else():
    heavy = "{'torch', 'megatron', 'vllm', 'transformers', 'prefect', 'pyarrow', 'numba'}"
    assert fresh(f"import sys, prefect_rlhf; print(*({heavy} & sys.modules.keys()))") == []


def test_no_name_of_the_door_loads_an_engine():
    heavy = "{'torch', 'megatron', 'vllm', 'transformers'}"
    all_names = "import sys; from tests.door import public_names; public_names()"
    assert fresh(f"{all_names}; print(*({heavy} & sys.modules.keys()))") == []


def test_the_package_has_few_names():
    assert len(dir(prefect_rlhf)) <= 52


def test_names_and_signatures_stay_as_they_are():
    """`python -m tests.door` freezes them anew; CHANGELOG.md then says what authors must change."""
    assert door() == FROZEN.read_text()


def test_a_star_imports_every_name():
    names: dict[str, object] = {}
    exec("from prefect_rlhf import *", names)
    assert names.keys() >= set(dir(prefect_rlhf))


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'prefect_rlhf' has no attribute 'generat'"):
        prefect_rlhf.generat  # noqa: B018


def test_a_moved_or_misspelt_name_is_answered_with_the_right_name():
    """Python shows the similar names of the object, of the name that an error has, below it."""
    with pytest.raises(AttributeError, match="; it is in prefect_rlhf.computations$"):
        prefect_rlhf.grpo_advantages  # noqa: B018
    with pytest.raises(AttributeError, match="; it is in prefect_rlhf.losses and prefect_rlhf.algorithms$"):
        prefect_rlhf.grpo  # noqa: B018
    for module, name, meant in ((prefect_rlhf, "Promts", "Prompts"), (prefect_rlhf.algorithms, "grop", "grpo")):
        with pytest.raises(AttributeError) as refused:
            getattr(module, name)
        assert (refused.value.obj, refused.value.name) == (module, name) and meant in dir(module)


FLOW = """from prefect_rlhf import GRPO, Model, Prompts, Reward
from prefect_rlhf import compute, computations, generate, losses, rlhf_flow, score, train_step

@rlhf_flow("mine")
def mine(prompts: Prompts, actor: Model, reward: Reward, algo: GRPO = GRPO()) -> None:
    rollout = generate(actor, prompts, batch_size=8, samples=8)
    advantages = compute(computations.grpo_advantages, rollout, score(reward, rollout), settings=algo)
    train_step(actor, losses.grpo(algo).on(rollout, advantages))
"""


def test_a_flow_that_imports_from_the_door_draws_without_a_warning(tmp_path):
    (tmp_path / "my_flow.py").write_text(FLOW)
    program = (
        "import sys; from prefect_rlhf.flows.commands.cli import main; sys.exit(main(['graph', 'my_flow.py:mine']))"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("page", PAGES_OF_AUTHORS, ids=lambda page: page.name)
def test_no_guide_imports_deeper_than_the_door(page):
    programs = re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)
    modules = {
        node.module
        for program in programs
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prefect_rlhf")
    }
    assert modules <= {"prefect_rlhf", *(f"prefect_rlhf.{name}" for name in MODULES)}


def test_no_room_goes_through_the_door():
    """Rooms import each other's files; the door stands above them all."""
    assert set(ROOMS) == {name.split(".")[0] for name in files()}
    through = {
        name
        for name, path in files().items()
        for other in imported(path)
        if other == "prefect_rlhf.door" or re.fullmatch(rf"prefect_rlhf\.({'|'.join(dir(prefect_rlhf))})", other)
    }
    assert through == set()
