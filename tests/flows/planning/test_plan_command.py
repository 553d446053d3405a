"""`prefect-rlhf plan`: a plan for a cluster that need not be there, and mistakes in asking for one."""

import json
import os
import re
import signal
import xml.etree.ElementTree as ET
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from prefect_rlhf.errors.errors import InvalidInput, NoClusterFits, PlanDoesNotFit
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.commands.flags import read_parameters
from prefect_rlhf.flows.commands.plan import interruptible
from prefect_rlhf.flows.forms.plan_options import plan_options
from prefect_rlhf.flows.planning.answer import answer_question
from prefect_rlhf.flows.planning.assumptions import assumptions
from prefect_rlhf.flows.planning.given_plan import GivenPlan
from prefect_rlhf.flows.planning.plan_report import question_text, without_orders
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.lengths import parse_lengths
from prefect_rlhf.placement.cost.datasheets.correction import CONSTANTS
from prefect_rlhf.placement.cost.datasheets.hardware import Links
from prefect_rlhf.placement.cost.times.profile import Profile
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.planner.passes.simplicity import complexity
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.search.partial.incumbent import SearchOutcome
from tests.placement.search.test_driver import two_calls
from tests.support.cases import combinations
from tests.support.runs import prepared, whole
from tests.support.strategies import SMALL, model, placed, remax
from tests.support.tiny import make_model, ppo_parameters

TWO_CPUS = ClusterShape("desk", num_nodes=1, devices_per_node=2, device_memory_bytes=8 << 30)
HELD = whole(TWO_CPUS)
LENGTHS = ["--prompt-length", "256", "--response-length", "256"]
ON_TWO_CPUS = ["--cluster", "1x2:cpu", "--budget", "0.3"]
MODELS = ["--model", "actor=llama-7b", "--model", "critic=llama-7b"]
ONE_NODE = {
    "models": {"actor": "llama-7b", "critic": "llama-7b"},
    "cluster": "1x8:h100",
    "prompt_length": "512",
    "response_length": "512",
    "batch_size": 64,
}
ANSWERED = ["plan.yaml", "plan.json", "report.md", "certificate.json", "timeline.svg", "memory.svg"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models and data of a run, and its parameters as a file."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "parameters.yaml").write_text(yaml.safe_dump(ppo_parameters(folder)))
    return folder


@pytest.fixture(scope="module")
def answered(folder):
    """The answer for the run's own parameters on two devices without GPUs."""
    return plan(folder, "--parameters", str(folder / "parameters.yaml"), *ON_TWO_CPUS, "--explain", "--sweep", "2")


def plan(folder, *flags, algorithm="ppo"):
    """Ask; the folder of the answer."""
    assert main(["plan", algorithm, *flags, "--output", str(folder / "answer")]) == 0
    return folder / "answer"


def ready(folder, plan_file):
    """The run of the parameters under a plan file, as far as it goes without devices."""
    parameters = read_parameters(folder / "parameters.yaml", [f"plan={plan_file}"])
    return prepared(ppo, parameters, HELD)


def question(*models, algorithm="ppo", **values):
    """A what-if about 7B models that are not there."""
    given = {"cluster": "2x8:h100", "prompt_length": "256", "response_length": "256"} | values
    named = dict(model.split("=") for model in models or ("actor=llama-7b", "critic=llama-13b"))
    return read_question(find_flow(algorithm), plan_options({"algorithm": algorithm, "models": named, **given}))


def test_a_run_goes_by_the_plan_that_was_written(folder, answered):
    """For the same parameters: every check of a run passes, device memory included."""
    augmented = ready(folder, answered / "plan.yaml").augmented
    assert augmented.plan.name == "auto"
    assert len(augmented) > 20


def test_the_planned_graph_is_the_graph_that_runs(folder, answered):
    asked = read_question(
        ppo, plan_options({"cluster": "1x2:cpu", "parameters": read_parameters(folder / "parameters.yaml", [])})
    )
    assert asked.graph == ready(folder, answered / "plan.yaml").augmented.graph
    assert asked.workload.longest == ready(folder, answered / "plan.yaml").request.workload.longest


def test_the_answer_has_plan_certificate_picture_and_a_report(answered):
    assert {file.name for file in answered.iterdir()} == {*ANSWERED, "sweep.json", "sweep.svg"}
    certificate = json.loads((answered / "certificate.json").read_text())
    assert certificate["fits"] and {peak["device"] for peak in certificate["peaks"]} == {"n0:0", "n0:1"}
    titles = [one.text for one in ET.parse(answered / "timeline.svg").iter("{http://www.w3.org/2000/svg}title")]
    assert any("actor.generate" in title for title in titles)
    report = (answered / "report.md").read_text()
    for words in ("above the bound", "flattening", "actor_train", "runner-up: ", "device-hours", "holds:"):
        assert words in report


def test_a_plan_file_has_its_facts_as_comments(answered):
    lines = (answered / "plan.yaml").read_text().splitlines()
    assert lines[0].startswith("# ") and "s per iteration by the estimate" in lines[0]
    assert yaml.safe_load("\n".join(lines))["name"] == "auto"


def test_a_machine_reads_the_plan_and_its_figures_in_a_single_file(folder, answered):
    """A run reads the plan in it too, and skips the figures."""
    figures = json.loads((answered / "plan.json").read_text())["figures"]
    assert figures["seconds"] == pytest.approx(figures["lower_bound_seconds"] * (1 + figures["gap"]))
    assert figures["dollars_per_million_response_tokens"] is None
    assert figures["calls"]["actor_train"].keys() == {"seconds", "share", "tokens_per_second", "utilisation"}
    assert figures["depends_most_on"]["constant"] in CONSTANTS and figures["depends_most_on"]["share"] > 0
    assert f"depends most on {figures['depends_most_on']['constant']} (" in (answered / "plan.yaml").read_text()
    of_json, of_yaml = (ready(folder, answered / name).augmented.plan for name in ("plan.json", "plan.yaml"))
    assert of_json == of_yaml


def test_a_plan_that_is_named_auto_gets_another_name_in_the_tables(tmp_path):
    """The file of an earlier answer is named so."""
    asked = question("actor=llama-7b", "critic=llama-7b", cluster="1x8:h100")
    file = tmp_path / "plan.yaml"
    file.write_text(plan_yaml(preset("flattening", asked.graph, asked.site.cluster, asked.site.mesh, 512)))
    assert GivenPlan.read(str(file), asked).row.name == "flattening of plan.yaml"
    file.write_text(file.read_text().replace("name: flattening", "name: auto"))
    assert GivenPlan.read(str(file), asked).row.name == "auto of plan.yaml"


def test_the_file_leaves_out_orders_that_a_run_chooses_by_itself():
    """And keeps one that a run would not choose."""
    models = tuple(model(one.role, one.head, replace(SMALL, num_kv_heads=4)) for one in remax().models)
    graph, four = replace(remax(), models=models), ClusterShape("four", 1, 4, 80 << 30)
    plan = preset("flattening", graph, four, four.whole, 256)
    plain = placed(placed(plan, "actor_train_step", dp=1, tp=4), "actor_generate", dp=2, tp=2)
    chosen = aligned(plain, graph)
    other = placed(plain, "actor_generate", device_order=(3, 2, 1, 0))
    assert chosen["actor_generate"].device_order
    assert without_orders(chosen, graph) == plain
    assert without_orders(other, graph) == other


def test_a_plan_that_a_person_edited_is_checked_when_a_run_loads_it(folder, answered):
    broken = folder / "broken.yaml"
    broken.write_text((answered / "plan.yaml").read_text().replace("actor_train:", "actor_trian:"))
    with pytest.raises(ValueError, match="actor_trian"):
        ready(folder, broken)


def test_your_own_plan_is_priced_certified_and_compared_with_auto(folder, answered, tmp_path):
    """Here the one that was found before: as fast as what is found again, with the same certificate."""
    own = tmp_path / "mine.yaml"
    own.write_text((answered / "plan.yaml").read_text().replace("name: auto", "name: mine"))
    certificate = (answered / "certificate.json").read_text()
    again = plan(tmp_path, "--parameters", str(folder / "parameters.yaml"), *ON_TWO_CPUS, "--plan", str(own))
    report = (again / "report.md").read_text()
    assert "+0.0% against auto" in report and "memory: fits" in report
    assert [line.split()[0] for line in report.splitlines() if line.startswith(("auto ", "mine "))] == ["auto", "mine"]
    held, before = json.loads((again / "your_certificate.json").read_text()), json.loads(certificate)
    tensors = [
        [[share for share in peak["shares"] if share["what"] != "fragments"] for peak in each["peaks"]]
        for each in (held, before)
    ]
    assert tensors[0] == tensors[1] and held["device_bytes"] == TWO_CPUS.device_memory_bytes > before["device_bytes"]
    assert (again / "your_timeline.svg").exists()


def test_your_own_plan_that_does_not_fit_is_priced_and_reported(tmp_path):
    """Two models of 7 billion parameters trained whole on each of eight devices."""
    asked = question("actor=llama-7b", "critic=llama-7b", cluster="1x8:h100")
    calls = [call for call in asked.graph if call.kind != "compute" and call.every is None]
    chosen = {call.name: Placement(asked.site.mesh, Strategy(8), "megatron") for call in calls}
    file = tmp_path / "mine.yaml"
    file.write_text(plan_yaml(asked.plan("mine", chosen)))
    given = GivenPlan.read(str(file), asked)
    assert given.row.refused == "does not fit" and given.estimate.seconds > 0
    with pytest.raises(InvalidInput, match=r"plan.calls.actor_generate.mesh: got 'n0:0-7', expected .* 0 to 3"):
        GivenPlan.read(str(file), question("actor=llama-7b", "critic=llama-7b", cluster="1x4:h100"))


@pytest.mark.all
def test_your_own_plan_is_priced_even_if_the_search_finds_no_plan(tmp_path):
    """A model of 70 billion parameters on one device, on which no call of it fits."""
    asked = question("actor=llama-70b", "critic=llama-7b", cluster="1x1:h100")
    calls = [call for call in asked.graph if call.kind != "compute" and call.every is None]
    file = tmp_path / "mine.yaml"
    file.write_text(
        plan_yaml(asked.plan("mine", {c.name: Placement(asked.site.mesh, Strategy(), "megatron") for c in calls}))
    )
    models = {"actor": "llama-70b", "critic": "llama-7b"}
    values = {"cluster": "1x1:h100", "prompt_length": "256", "response_length": "256", "plan": str(file)}
    with pytest.raises(PlanDoesNotFit, match="GiB by more devices") as error:
        answer_question(plan_options({"algorithm": "ppo", "models": models, **values}))
    seconds, memory, *_ = error.value.report.splitlines()
    assert seconds.startswith("mine: ") and " s per iteration by the estimate" in seconds
    assert memory.startswith("memory: does not fit")


@pytest.mark.all
def test_no_plan_uses_the_headroom_of_a_device():
    """The answer without it fills more than that; with it the certificate counts what is left."""
    wide, narrow = (
        answer_question(plan_options(ONE_NODE | {"evaluations": 3000, "headroom": share})) for share in (0, "30%")
    )
    assert wide.planned.certificate.used_share() > 0.7 >= narrow.planned.certificate.used_share(0.3)
    assert narrow.planned.certificate.fits and narrow.planned.certificate.used_share() <= 1
    assert narrow.planned.certificate.device_bytes == int(wide.planned.certificate.device_bytes * 0.7)
    assert all(
        narrow.question.certificate(preset.plan).used_share(0.3) <= 0.7
        for preset in narrow.planned.presets
        if preset.plan
    )


@pytest.mark.all
def test_simplicity_is_how_much_slower_than_the_fastest_plan_a_simpler_answer_may_be():
    longer = ONE_NODE | {"response_length": "1024", "evaluations": 300}  # the simplest plan is not the fastest
    answers = [answer_question(plan_options(longer | {"simplicity": share})) for share in ("30%", 0)]
    simple, fastest = (answer.planned for answer in answers)
    parts = [complexity(each.question, each.planned.plan, each.planned.certificate) for each in answers]
    assert fastest.seconds < simple.seconds <= 1.3 * fastest.seconds
    assert parts[0] < parts[1]
    assert fastest.seconds == fastest.fastest_seconds


@pytest.mark.all
def test_a_plan_that_fills_a_device_nearly_is_marked():
    answer = answer_question(plan_options(ONE_NODE | {"evaluations": 3000, "device_memory_gib": 64, "headroom": 0}))
    plans = {"auto": answer.planned.plan} | {one.name: one.plan for one in answer.planned.presets}
    full = {name for name, plan in plans.items() if plan and answer.question.certificate(plan).used_share() > 0.96}
    marked = {row["plan"]: row["note"] for row in answer.planned.rows()}
    assert full == {name for name, note in marked.items() if re.fullmatch(r"fills (9\d|100)\.\d% of a device", note)}
    assert full and len(full) < len(plans)


def test_a_run_keeps_the_headroom_of_its_options(folder):
    whole, less = (
        prepared(ppo, read_parameters(folder / "parameters.yaml", [word]), HELD)
        for word in ("headroom=0", "headroom=50%")
    )
    assert less.chosen.certificate.device_bytes == whole.chosen.certificate.device_bytes // 2
    with pytest.raises(InvalidInput, match=r"headroom: got '51%', expected at most 0.5"):
        prepared(ppo, read_parameters(folder / "parameters.yaml", ["headroom=51%"]), HELD)


def test_a_pinned_call_is_on_its_mesh(folder, tmp_path):
    """The reference model alone on the second device, as the plan file says."""
    flags = ["--parameters", str(folder / "parameters.yaml"), *ON_TWO_CPUS, "--pin", "ref_inference=n0:1"]
    written = yaml.safe_load((plan(tmp_path, *flags) / "plan.yaml").read_text())
    assert written["calls"]["ref_inference"]["mesh"] == "n0:1"


@pytest.mark.parametrize(
    ("algorithm", "roles"),
    [
        ("ppo", ["actor", "critic"]),
        ("grpo", ["actor", "reward"]),
        ("remax", ["actor", "reward"]),
        ("dpo", ["actor"]),
        ("kto", ["actor"]),
        ("sft", ["actor"]),
        ("safe-rlhf", ["actor", "critic"]),
        ("reward", ["reward"]),
    ],
)
def test_every_algorithm_is_traced_with_models_and_data_that_are_not_there(algorithm, roles):
    asked = question(*(f"{role}=llama-7b" for role in roles), algorithm=algorithm)
    assert asked.graph.name == algorithm
    assert asked.site.mesh.num_devices == 16


@pytest.mark.parametrize(
    ("actor", "lengths", "batch_size", "cluster"),
    [
        ("qwen2.5-7b", ("1024", "31744"), 64, "4x8:h100"),
        pytest.param("llama-3.1-405b", ("1024", "1024"), 256, "64x8:h100", marks=pytest.mark.all),
    ],
)
def test_long_rows_and_large_models_have_a_plan_that_fits(actor, lengths, batch_size, cluster):
    """Because sequences are divided, or layers recomputed."""
    asked = {"algorithm": "grpo", "models": {"actor": actor}, "batch_size": batch_size, "cluster": cluster}
    asked |= dict(zip(("prompt_length", "response_length"), lengths, strict=True))
    found = answer_question(plan_options(asked))
    assert found.planned.certificate.fits and found.planned.gap < 0.05
    trained = found.planned.plan["actor_train"]
    assert trained.sequence_parallel or trained.recompute


def test_your_own_flow_is_traced_too():
    assert question(algorithm="prefect_rlhf.flows.ppo:ppo").graph == question().graph


def test_the_reference_is_like_the_actor_and_the_reward_like_the_critic():
    shapes = {model.role: model.shape for model in question().graph.models}
    assert shapes["ref"] == shapes["actor"] == KNOWN_SHAPES["llama-7b"]
    assert shapes["reward"] == shapes["critic"] == KNOWN_SHAPES["llama-13b"]


def test_a_folder_needs_only_its_config(tmp_path):
    folder = tmp_path / "model"
    make_model(folder)
    (folder / "model.safetensors").unlink()
    asked = question(f"actor={folder}", f"critic={folder}", prompt_length="16", response_length="16")
    assert asked.graph.model("actor").shape.num_layers == 2


def test_a_plan_only_model_is_reported_in_one_line():
    """Roles that share the model share the line; a model that runs has none."""
    text = question_text(question("actor=google/gemma-2-9b", "critic=gemma-2-2b"))
    lines = [line for line in text.splitlines() if line.startswith("planned, but cannot run yet")]
    assert [line.partition(": ")[2].partition(",")[0] for line in lines] == [
        "google/gemma-2-9b (actor",
        "gemma-2-2b (critic",
    ]
    assert "cannot run" not in question_text(question())


@pytest.mark.parametrize(("cluster", "says"), [("1x1:h100", " on 1 device ("), ("1x8:h100", " on 8 devices (")])
def test_the_number_of_devices_is_in_plain_english(cluster, says):
    assert says in question_text(question(cluster=cluster)).splitlines()[0]


def test_a_mixture_of_experts_is_planned_and_its_plan_file_is_read_back(capsys, tmp_path):
    """With the degree of expert parallelism in the file and in the table; a wrong one is a line."""
    asked = ["plan", "dpo", "--model", "actor=qwen3-30b-a3b", "--cluster", "1x8:h200", *LENGTHS, "--batch-size", "16"]
    made, again = tmp_path / "made", tmp_path / "again"
    assert main([*asked, "--budget", "0.3", "--output", str(made)]) == 0
    said = capsys.readouterr().out
    assert "do not run Qwen3MoeForCausalLM, a mixture of experts" in said
    (titles,) = [line.split() for line in said.splitlines() if re.match("call +engine", line)]
    assert titles[3:7] == ["dp", "tp", "pp", "ep"]
    text = (made / "plan.yaml").read_text()
    assert re.search(r"actor_train: .*pp: \d, ep: [248]", text)
    assert main([*asked, "--budget", "0.3", "--output", str(again), "--plan", str(made / "plan.yaml")]) == 0
    (made / "plan.yaml").write_text(re.sub(r"ep: \d", "ep: 3", text))
    assert main([*asked, "--budget", "0.3", "--output", str(again), "--plan", str(made / "plan.yaml")]) == 2
    assert "ep: got 3, expected a divisor of dp " in capsys.readouterr().err


def test_a_familys_models_are_planned_together_with_any_vocabulary_padding():
    """Qwen2.5 has the same tokens in every size, in tables of two sizes; the smaller table cannot read the larger."""
    text = question_text(question("actor=qwen2.5-7b", "critic=qwen2.5-1.5b"))
    assert "cannot run: critic, whose vocabulary of 151936 lacks some of the 152064 tokens that actor may" in text
    assert "cannot run" not in question_text(question("actor=qwen2.5-1.5b", "critic=qwen2.5-7b"))


@pytest.mark.parametrize(("batch", "hint"), [(100, "96 or 112 do"), (128, ""), (4, "")])
def test_a_batch_that_divides_badly_gets_a_hint(batch, hint):
    """100 rows in two mini-batches over eight devices: numbers near by that divide by sixteen."""
    text = question_text(question(cluster="1x8:h100", batch_size=batch))
    assert ("hint: " in text) == bool(hint) and hint in text


def test_parameters_of_the_flow_change_the_graph():
    """PPO that recomputes log-probabilities has a call more."""
    parameters = {"algo": {"old_logprobs": "recompute"}}
    assert len(question(parameters=parameters).graph.calls) > len(question().graph.calls)


def test_grpo_without_named_models_is_planned_for_functions_without_reference():
    """The reference is the actor's twin unless its KL counts for nothing; PPO's reward is like its critic."""
    only_actor = {"algorithm": "grpo", "models": {"actor": "llama-7b"}}
    assert {model.role for model in question(**only_actor).graph.models} == {"actor", "ref"}
    assert question(**only_actor).graph.call("score").on_hosts
    without = question(**only_actor, parameters={"algo": {"kl": {"coefficient": 0}}})
    assert {model.role for model in without.graph.models} == {"actor"}
    assert "reward" in {model.role for model in question().graph.models}


def test_a_shared_trunk_is_planned_where_the_actor_has_both_heads():
    """No critic, and a reward model like the actor; without the head the critic has to be named."""
    asked = question("actor=llama-7b", parameters={"actor": {"head": "lm+scalar"}}).graph
    assert {model.role: model.head for model in asked.models} == {"actor": "lm+scalar", "ref": "lm", "reward": "scalar"}
    assert asked.model("reward").shape == asked.model("actor").shape
    assert len(asked.call("actor_train").terms) == 2


def test_batch_and_response_go_where_the_algorithm_reads_them():
    asked = question(batch_size=64, response_length="100:1,200:1")
    generate = asked.graph.call("actor_generate")
    assert generate.num_rows == 64
    assert json.loads(generate.operation.settings)["max_new_tokens"] == 200
    assert asked.workload.responses.mean == 150


def test_evaluation_on_data_that_is_not_there_has_as_many_rows_as_a_step():
    assert question(batch_size=64).graph.call("actor_evaluation").num_rows == 64


def test_lengths_may_come_from_a_runs_rollouts(tmp_path):
    file = tmp_path / "step-000001.parquet"
    pq.write_table(pa.table({"tokens": [[1] * 5, [1] * 7], "logprobs": [[0.0] * 2, [0.0] * 3]}), file)
    assert parse_lengths(str(file), "response_length", "response").shares == ((2, 0.5), (3, 0.5))
    assert parse_lengths(str(tmp_path), "prompt_length", "prompt").shares == ((3, 0.5), (4, 0.5))


PLAY = {"function": "my_play.py:solve", "max_tokens": 512, "max_turns": 6, "expected_turns": 2}


def played(**values):
    """A what-if about GRPO with a play that is not there."""
    parameters = {
        "play": PLAY,
        "algo": {"batch_size": 64, "kl": {"coefficient": 0}, "sampling": {"max_new_tokens": 64}},
    }
    return question("actor=llama-7b", algorithm="grpo", parameters=parameters, **values)


def test_turns_may_come_from_a_runs_rollouts(tmp_path):
    """Three rows: of two and four turns with 3 and 5 tokens of answers; the play of the third failed."""
    (tmp_path / "rollouts").mkdir()
    masks = [[1, 0, 0, 0, 1], [1, 0, 0, 1, 0, 0, 1, 0, 1], [0, 0]]
    columns = {
        "tokens": [[1] * (10 + len(mask)) for mask in masks],
        "logprobs": [[0.0] * len(mask) for mask in masks],
        "mask": masks,
        "turns": [2, 4, 1],
    }
    pq.write_table(pa.table(columns), tmp_path / "rollouts" / "step-000001.parquet")
    steps = [
        {"step": step, "actor_generate.answer_seconds": seconds} for step, seconds in enumerate((0.2, 0.4), start=1)
    ]
    evaluated = {"actor_evaluation.answer_seconds": 2.0}  # of held-out prompts; metrics.jsonl has it too
    for name, lines in (("metrics", [steps[0] | evaluated, steps[1]]), ("evaluation", [{"step": 0} | evaluated])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for place in (tmp_path / "rollouts", tmp_path / "rollouts" / "step-000001.parquet"):
        asked = played(response_length=str(place))
        for name in ("actor_generate", "actor_evaluation"):
            play = asked.graph.call(name).play
            assert (play.turns, play.observed, play.seconds) == (3, 4, pytest.approx(0.3))
        assert asked.workload.responses.longest == 512, "for memory"
        assert asked.workload.responses.mean == pytest.approx((5 + 9 + 2) / 3)
        assert not any("a row of the play" in line for line in assumptions(asked))
    (tmp_path / "metrics.jsonl").unlink()
    assert played(response_length=str(tmp_path / "rollouts")).graph.call("actor_generate").play.seconds == 0.05


def test_a_question_about_a_play_is_answered(folder, capsys):
    """Its code need not be there; what the play waits for is in the estimate of each generate."""
    asked = ["--model", "actor=llama-7b", "--cluster", "1x8:h100", "--budget", "0.3", *LENGTHS]
    settings = ["play.function=my_play.py:solve", "play.max_tokens=512", "algo.kl.coefficient=0"]
    answer = plan(folder, *asked, *(word for one in settings for word in ("-p", one)), algorithm="grpo")
    assert {file.name for file in answer.iterdir()} >= set(ANSWERED)
    assert "assumed: a row of the play has 3 turns, 200 tokens of answers in all" in capsys.readouterr().out
    assert json.loads((answer / "certificate.json").read_text())["fits"]


def test_without_rollouts_turns_come_from_the_settings():
    asked = played(response_length="400:1")
    play = asked.graph.call("actor_generate").play
    assert (play.turns, play.observed, play.seconds) == (2, 100, 0.05)
    (line,) = (line for line in assumptions(asked) if "a row of the play" in line)
    assert line.startswith("a row of the play has 2 turns, 100 tokens of answers in all, and waits 0.05 s for each")


def test_nodes_of_two_kinds_keep_their_own_memory():
    where = question(cluster="1x8:a100-40+1x8:v100-32").site
    assert [where.cluster.whole_memory_bytes(node) >> 30 for node in (0, 1)] == [39, 31]
    assert [node.device.name for node in where.sources.nodes] == ["a100-40", "v100-32"]


def test_without_a_cluster_the_work_pools_lease_is_planned(monkeypatch):
    monkeypatch.setenv("RLHF_LEASE", replace(HELD, devices=()).to_json())
    assert question(cluster="").site.mesh == TWO_CPUS.whole


def test_the_first_interrupt_ends_the_search_with_the_best_plan_so_far(capsys):
    with interruptible() as progress:
        os.kill(os.getpid(), signal.SIGINT)
        found = search(two_calls(), 60, "metropolis-hastings", progress=progress)
    assert found.outcome is SearchOutcome.INTERRUPTED and found.plan is not None
    assert "lower bound" in capsys.readouterr().err


def profile(**changes):
    """A profile's file content."""
    made = Profile(
        KNOWN_SHAPES["llama-7b"], "bfloat16", "h100", (("torch", "0.0"),), (), Links(1e12, 1e11, 1e10, 1e10), 1e-9
    )
    return replace(made, **changes).to_json()


ONE = ["--cluster", "1x8:h100"]
CASES = {
    "no node": (["--cluster", "0x8:h100", *LENGTHS, *MODELS], "0x8:h100"),
    "no device": (["--cluster", "2x0:h100", *LENGTHS, *MODELS], "2x0:h100"),
    "an unknown kind of device": (["--cluster", "2x8:b9000", *LENGTHS, *MODELS], "b9000"),
    "a cluster that is none": (["--cluster", "sixteen", *LENGTHS, *MODELS], "16x8:h100"),
    "no cluster": ([*LENGTHS, *MODELS], "cluster"),
    "nodes of unequal width": (["--cluster", "1x8:h100+1x4:h100", *LENGTHS, *MODELS], "the same number in every node"),
    "GPUs beside none": (["--cluster", "1x8:h100+1x8:cpu", *LENGTHS, *MODELS], "only GPUs"),
    "an unknown network": (["--cluster", "2x8:h100", "--network", "pigeon", *LENGTHS, *MODELS], "pigeon"),
    "no memory": ([*ONE, "--device-memory-gib", "0", *LENGTHS, *MODELS], "device_memory_gib"),
    "a headroom of more than half": ([*ONE, "--headroom", "51%", *LENGTHS, *MODELS], "headroom: got '51%', expected at most 0.5"),
    "a simplicity of more than half": ([*ONE, "--simplicity", "51%", *LENGTHS, *MODELS], "simplicity: got '51%', expected at most 0.5"),
    "a headroom that leaves nothing": ([*ONE, "--device-memory-gib", "2", "--headroom", "0.5", *LENGTHS, *MODELS], "headroom: got 0.5, expected less than 0.1"),
    "a mesh and a pin of a call": ([*ONE, *LENGTHS, *MODELS, "--pin", "ref_inference=n0:0-3", "-p", "placement.ref_inference.mesh=n0:4-7"], "pins.ref_inference: got 'n0:0-3', expected n0:4-7, as placement.ref_inference.mesh"),
    "a word that the engine lacks": ([*ONE, *LENGTHS, *MODELS, "-p", "placement.ref_inference.recompute=all"], "placement.ref_inference.recompute: 'all' is not used"),
    "words that conflict": ([*ONE, *LENGTHS, *MODELS, *(word for call in ("critic_inference", "critic_train") for value in ("mesh=n0:0-7", "dp=1", "tp=8", "pp=1") for word in ("-p", f"placement.{call}.{value}")), "-p", "placement.critic_inference.offload=all", "-p", "placement.critic_train.offload=none"], "placement.critic_train.offload: got 'none', expected all, as placement.critic_inference.offload"),
    "a negative headroom": ([*ONE, "--headroom=-10%", *LENGTHS, *MODELS], "headroom: got '-10%'"),
    "a headroom that is no share": ([*ONE, "--headroom", "much", *LENGTHS, *MODELS], "headroom: got 'much'"),
    "an imbalance without experts": ([*ONE, *LENGTHS, *MODELS, "--expert-imbalance", "2"], "expert_imbalance: 2.0 is not used: no model is a mixture of experts; remove it"),
    "an imbalance below the mean": ([*ONE, *LENGTHS, *MODELS, "--expert-imbalance", "0.5"], "expert_imbalance: got 0.5, expected "),
    "no host memory": ([*ONE, "--host-memory-gib", "0", *LENGTHS, *MODELS], "host_memory_gib"),
    "an unknown algorithm": ([*ONE, *LENGTHS, "--model", "actor=llama-7b"], "no_such"),
    "an unknown model": ([*ONE, *LENGTHS, "--model", "actor=llama-8b", "--model", "critic=llama-7b"], "llama-8b"),
    "an unknown model and none for another role": ([*ONE, *LENGTHS, "--model", "actor=llama-8b"], "models.actor: got 'llama-8b'"),
    "two unknown models": ([*ONE, *LENGTHS, "--model", "actor=llama-8b", "--model", "reward=bert"], "models: got 'actor=llama-8b, reward=bert'"),
    "a mixture of experts of a family that is not planned": ([*ONE, *LENGTHS, "--model", "actor=deepseek-v3"], "deepseek-v3"),
    "a pin of no call": ([*ONE, *LENGTHS, *MODELS, "--pin", "judge=n0:0"], "pins.judge: got 'n0:0', expected a call with a model"),
    "a pin on no mesh": ([*ONE, *LENGTHS, *MODELS, "--pin", "ref_inference=n0:1-2"], "pins.ref_inference: got 'n0:1-2', expected whole nodes"),
    "a pin that is none": ([*ONE, *LENGTHS, *MODELS, "--pin", "ref_inference=first"], "pins.ref_inference: got 'first', expected a mesh such as"),
    "a plan that is not there": ([*ONE, *LENGTHS, *MODELS, "--plan", "mine.yaml"], "plan: got 'mine.yaml', expected a readable file"),
    "an unknown role": ([*ONE, *LENGTHS, *MODELS, "--model", "judge=llama-7b"], "judge"),
    "a role without a model": ([*ONE, *LENGTHS, "--model", "actor=llama-7b"], "models.critic"),
    "a model without a role": ([*ONE, *LENGTHS, "--model", "llama-7b"], "--model: got 'llama-7b', expected ROLE=MODEL, such as actor=llama-7b"),
    "two vocabularies": ([*ONE, *LENGTHS, "--model", "actor=llama3-7b", "--model", "critic=llama-7b"], "vocab"),
    "a model too large for any plan": (["--cluster", "1x1:h100", *LENGTHS, *MODELS], "GiB by"),
    "more mini-batches than rows": ([*ONE, *LENGTHS, *MODELS, "--batch-size", "2", "-p", "algo.update.mini_batches=3"], "2 rows a step"),
    "an empty batch": ([*ONE, *LENGTHS, *MODELS, "--batch-size", "0"], "batch_size"),
    "no budget": ([*ONE, *LENGTHS, *MODELS, "--budget", "0"], "budget_seconds"),
    "a price that is no number": ([*ONE, *LENGTHS, *MODELS, "--price", "h100=cheap"], "prices.h100: got 'cheap'"),
    "a price of nothing": ([*ONE, *LENGTHS, *MODELS, "--price", "h100=0"], "prices.h100: got 0"),
    "a negative price": ([*ONE, *LENGTHS, *MODELS, "--price", "h100=-2.5"], "prices.h100: got -2.5"),
    "a price that is not finite": ([*ONE, *LENGTHS, *MODELS, "--price", "h100=.nan"], "prices.h100: got nan"),
    "a price of no device": ([*ONE, *LENGTHS, *MODELS, "--price", "2.5"], "--price: got '2.5', expected KIND=DOLLARS, such as "),
    "a price of an unknown device": ([*ONE, *LENGTHS, *MODELS, "--price", "b9000=2.5"], "prices.b9000: got 'b9000'"),
    "a price of a device that no node has": ([*ONE, *LENGTHS, *MODELS, "--price", "h100=2,a100-80=1"], "prices.a100-80: 1.0 is not used: the devices are h100; remove it"),
    "a device without a price": (["--cluster", "1x8:a100-40+1x8:v100-32", *LENGTHS, *MODELS, "--price", "v100-32=1"], "prices.a100-40"),
    "two prices of a device": ([*ONE, *LENGTHS, *MODELS, "--price", "h100=2", "--price", "h100=3"], "--price: got 'h100=3', expected a single price for h100"),
    "an unknown method": ([*ONE, *LENGTHS, *MODELS, "--method", "genetic"], "genetic"),
    "no lengths": ([*ONE, *MODELS], "prompt_length"),
    "lengths that are none": ([*ONE, *MODELS, "--prompt-length", "long"], "long"),
    "rows longer than the context": ([*ONE, *MODELS, "--prompt-length", "4000", "--response-length", "200"], "4096"),
    "responses longer than may be made": ([*ONE, *LENGTHS, *MODELS, "-p", "algo.sampling.max_new_tokens=9"], "at most 9"),
    "a misspelt hyperparameter": ([*ONE, *LENGTHS, *MODELS, "-p", "algo.clipp=1"], "clipp"),
    "a list without sizes": (["--cluster", "h100,h200", *LENGTHS, *MODELS], "cluster: got 'h100,h200', expected nodes x devices"),
    "an unknown device in a list": (["--cluster", "h100,b9000", "--sweep", "1,2", *LENGTHS, *MODELS], "cluster: got 'b9000', expected one of h100"),
    "a list with an end missing": (["--cluster", "1x8:h100,", *LENGTHS, *MODELS], "cluster: got '1x8:h100,'"),
    "a sweep over nodes of two kinds": (["--cluster", "1x8:a100-40+1x8:v100-32", "--sweep", "2", *LENGTHS, *MODELS], "sweep: got '1x8:a100-40+1x8:v100-32', expected a cluster with a single kind"),
    "a price of a device that no cluster has": (["--cluster", "h100,h200", "--sweep", "1", *LENGTHS, *MODELS, "--price", "h100=2,h200=3,l40s=1"], "prices.l40s: 1.0 is not used: the devices are h100, h200"),
    "a device of a list without a price": (["--cluster", "h100,h200", "--sweep", "1", *LENGTHS, *MODELS, "--price", "h100=2"], "prices.h200: missing"),
    "a plan file for several clusters": (["--cluster", "h100,h200", "--sweep", "1", *LENGTHS, *MODELS, "--plan", "mine.yaml"], "plan: 'mine.yaml' is not used"),
    "a throughput of nothing": ([*ONE, *LENGTHS, *MODELS, "--sweep", "1,2", "--at-least", "0"], "at_least: got 0"),
    "a negative throughput": ([*ONE, *LENGTHS, *MODELS, "--sweep", "1,2", "--at-least", "-3"], "at_least: got -3"),
    "a throughput that is no number": ([*ONE, *LENGTHS, *MODELS, "--sweep", "1,2", "--at-least", "fast"], "at_least: got 'fast'"),
    "a throughput that is not finite": ([*ONE, *LENGTHS, *MODELS, "--sweep", "1,2", "--at-least", ".nan"], "at_least: got nan"),
    "a throughput of a single cluster": ([*ONE, *LENGTHS, *MODELS, "--at-least", "100"], "at_least: 100.0 is not used: there is a single cluster; remove it, or name more"),
    "a sweep over nothing": ([*ONE, *LENGTHS, *MODELS, "--sweep", "0,1"], "sweep.0"),
    "a sweep that is no list": ([*ONE, *LENGTHS, *MODELS, "--sweep", "1-4"], "1-4"),
    "a profile that is not there": ([*ONE, *LENGTHS, *MODELS, "--profile", "nowhere.json"], "nowhere.json"),
    "a profile that is none": ([*ONE, *LENGTHS, *MODELS, "--profile", "{}"], "as rlhf/profile writes it"),
    "a profile of another device": ([*ONE, *LENGTHS, *MODELS, "--profile", profile(device="a100-40")], "a100-40"),
    "a profile of another version": ([*ONE, *LENGTHS, *MODELS, "--profile", profile()], "profile.versions.torch"),
    "a profile of another model": ([*ONE, *LENGTHS, *MODELS, "--profile", profile(shape=KNOWN_SHAPES["llama-70b"])], "profile.shape"),
}  # fmt: skip


SEARCHED = ("a word that the engine lacks", "words that conflict")
"""Mistakes that are found with a plan of the models."""


@pytest.mark.parametrize("case", combinations(CASES, briefly=[(case,) for case in CASES if case not in SEARCHED]))
def test_a_mistake_is_one_line_that_names_it(case, capsys, tmp_path, monkeypatch):
    flags, names = CASES[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHF_LEASE", raising=False)
    if "--profile" in flags and flags[-1].startswith("{"):
        (tmp_path / "profile.json").write_text(flags[-1])
        flags = [*flags[:-1], "profile.json"]
    assert main(["plan", "no_such" if case == "an unknown algorithm" else "ppo", "--budget", "0.3", *flags]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if " s: " not in line]
    assert len(said) == 1 and said[0].startswith("prefect-rlhf: ") and names in said[0]
    assert not (tmp_path / "plans").exists()


@pytest.mark.all  # test_three_lines.py has a sweep
def test_a_list_of_kinds_and_sizes_is_a_single_table_and_the_answer_its_smallest(capsys, tmp_path):
    """A kind alone stands for nodes of eight devices; with prices the smallest costs the least dollars an hour."""
    asked = ["plan", "dpo", "--model", "actor=llama-7b", *LENGTHS, "--batch-size", "32", "--evaluations", "1000"]
    some = ["--cluster", "a100-80, 1x4:h100,1x1:l40s", "--sweep", "2", "--price", "h100=5,a100-80=1,l40s=1"]
    made = tmp_path / "made"
    assert main([*asked, *some, "--at-least", "100", "--output", str(made)]) == 0
    table = json.loads((made / "sweep.json").read_text())
    rows = {row["cluster"]: row for row in table["sizes"]}
    assert list(rows) == ["2x8:a100-80", "1x4:h100", "2x4:h100", "1x1:l40s", "2x1:l40s"]
    fits = {name: row for name, row in rows.items() if row["seconds"]}
    assert "1x1:l40s" not in fits and " GiB on a device at best" in rows["1x1:l40s"]["refused"]
    assert table["smallest"] == min(fits, key=lambda name: fits[name]["dollars_per_hour"]) == "2x8:a100-80"
    assert json.loads((made / "plan.json").read_text())["figures"]["seconds"] == rows["2x8:a100-80"]["seconds"]
    said = capsys.readouterr().out
    assert "2x8:a100-80 is the smallest cluster that reaches 100 tokens/s (fewest dollars an hour)" in said
    assert main([*asked, *some, "--at-least", "1e9", "--output", str(tmp_path / "none")]) == 2
    line, header, *_ = (one for one in capsys.readouterr().err.splitlines() if " s: " not in one)
    assert line.startswith("prefect-rlhf: at_least: got 1000000000.0, expected at most ")
    assert header.split()[:3] == ["cluster", "devices", "seconds"] and not (tmp_path / "none").exists()


def test_if_no_plan_fits_a_table_shows_memory_use_and_remedies(capsys, tmp_path):
    """The actor trains alone on the devices, all else is in host memory: its state is more than a device has."""
    small = ["--cluster", "1x2:h100", "--device-memory-gib", "63.6", "--budget", "0.3"]
    assert main(["plan", "ppo", *small, *LENGTHS, *MODELS, "--output", str(tmp_path / "plans")]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if " s: " not in line]
    first = next(index for index, line in enumerate(said) if line.startswith("prefect-rlhf: "))
    line, helps, change, header, *rest = said[first:]
    assert "iB by more or larger devices" in line
    assert helps == "What would make it fit:" and change.startswith("  devices of ")
    assert header.split() == ["devices", "peak", "of", "at", "largest"]
    assert rest[0].startswith("n0:0")
    assert any("optimizer" in row for row in rest)
    assert not (tmp_path / "plans").exists()


@pytest.mark.parametrize(
    ("cluster", "enough", "less"),
    [("1x2:l40s", "8 devices are enough, as 1x8:l40s", "1x4:l40s"), pytest.param("1x8:v100-16", "24 devices are enough, as 3x8:v100-16", "2x8:v100-16", marks=pytest.mark.all)],
)  # fmt: skip
def test_a_refusal_says_how_many_devices_are_enough(cluster, enough, less):
    """The named number has a plan that fits, and half of it has none. Recomputation is not enough."""
    asked = {"algorithm": "dpo", "models": {"actor": "llama-13b"}, "prompt_length": "256", "response_length": "256"}
    asked |= {"batch_size": 64, "evaluations": 2000}
    with pytest.raises(InvalidInput, match=f"GiB by .*; recomputation of all layers is not enough; {enough}$"):
        answer_question(plan_options(asked | {"cluster": cluster}))
    found = answer_question(plan_options(asked | {"cluster": enough.partition("as ")[2]}))
    assert found.planned.certificate.fits
    with pytest.raises(InvalidInput, match="GiB by"):
        answer_question(plan_options(asked | {"cluster": less}))


def test_no_device_count_is_suggested_for_pinned_calls_or_several_kinds():
    asked = {"algorithm": "dpo", "models": {"actor": "llama-13b"}, "prompt_length": "256", "response_length": "256"}
    asked |= {"cluster": "1x2:l40s", "evaluations": 2000}
    with pytest.raises(InvalidInput, match="GiB by more devices .*recomputation of all layers is not enough$"):
        answer_question(plan_options(asked | {"pins": {"ref_inference": "n0:0"}}))
    with pytest.raises(InvalidInput, match="GiB by more devices .*recomputation of all layers is not enough$"):
        answer_question(plan_options(asked | {"cluster": "1x2:l40s+1x2:a10"}))


def test_a_list_of_clusters_without_a_plan_says_how_many_devices_of_each_kind_are_enough():
    """With different reasons in a table, or with the same reason."""
    asked = {"algorithm": "dpo", "models": {"actor": "llama-13b"}, "prompt_length": "256", "response_length": "256"}
    asked |= {"batch_size": 64, "evaluations": 2000}
    with pytest.raises(NoClusterFits) as error:
        answer_question(plan_options(asked | {"cluster": "1x2:l40s,1x4:v100-16,1x1:l40s"}))
    assert str(error.value).endswith("; 8 devices are enough, as 1x8:l40s; 24 devices are enough, as 3x8:v100-16")
    assert "1x4:v100-16" in error.value.report and error.value.report.count("does not fit: ") == 3
    enough = "4 devices are enough, as 1x4:h100; 4 devices are enough, as 1x4:a100-80"
    with pytest.raises(InvalidInput, match=f"GiB by .*; {enough}$"):
        answer_question(plan_options(asked | {"cluster": "1x2:h100,1x2:a100-80"}))


def test_the_other_commands_stay(capsys):
    """`plan` is a word before the algorithm; without it the command runs one."""
    assert main(["no_such_algorithm"]) == 2
    assert "no_such_algorithm" in capsys.readouterr().err


def test_a_plan_of_another_graph_is_refused_in_a_line(tmp_path):
    """Before any search: the calls of DPO are not those of PPO."""
    asked = question("actor=llama-7b", "critic=llama-7b", cluster="1x8:h100")
    calls = [call for call in asked.graph if call.kind != "compute" and call.every is None]
    chosen = {call.name: Placement(asked.site.mesh, Strategy(8), "megatron") for call in calls}
    file = tmp_path / "mine.yaml"
    file.write_text(plan_yaml(asked.plan("mine", chosen)))
    values = {"cluster": "1x8:h100", "prompt_length": "256", "response_length": "256", "plan": str(file)}
    with pytest.raises(InvalidInput) as error:
        answer_question(plan_options({"algorithm": "dpo", "models": {"actor": "llama-7b"}, **values}))
    assert "\n" not in str(error.value) and "calls" in str(error.value)
