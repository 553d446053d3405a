"""Blocks as Prefect shows them, parameters as a person types them, and the names that deployments rely on."""

import asyncio

import pytest
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from pydantic import ValidationError

from prefect_rlhf.blocks import cluster as cluster_module
from prefect_rlhf.blocks.chats import Chats, ChatsBlock
from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.blocks.dataset import Preferences, PreferencesBlock, Prompts, PromptsBlock
from prefect_rlhf.blocks.lease import lease
from prefect_rlhf.blocks.model import Model, ModelBlock
from prefect_rlhf.blocks.rated_answers import RatedAnswers, RatedAnswersBlock
from prefect_rlhf.blocks.worker.claimed_run import TakenRun
from prefect_rlhf.blocks.worker.variables import GpuMeshVariables
from prefect_rlhf.blocks.worker.worker import GpuMeshWorker
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE, Lease
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.models.model import TransformerShape
from tests.flows.hardware.test_gpus import driver, row  # noqa: F401  fixtures

pytestmark = pytest.mark.quick

BLOCKS = [Cluster, ModelBlock, PromptsBlock, PreferencesBlock, ChatsBlock, RatedAnswersBlock]

DATASET = "path split_column split chat_template chat_template_kwargs tools_column columns form"
FIELDS = {
    Cluster: "cluster num_nodes devices_per_node device_memory_gib host_memory_gib kind node_kinds lease_directory",
    ModelBlock: "path head dtype new_head eos_token chat_template adapter base_dtype",
    PromptsBlock: f"{DATASET} prompt_column last_answer system_prompt max_prompt_length overlong_prompts",
    PreferencesBlock: f"{DATASET} prompt_column chosen_column rejected_column end_of_text",
    ChatsBlock: f"{DATASET} messages_column prompt_column completion_column text_column",
    RatedAnswersBlock: f"{DATASET} prompt_column completion_column label_column",
    RatedAnswers: f"{DATASET} prompt_column completion_column label_column saved",
    Model: "path head dtype new_head eos_token chat_template adapter base_dtype saved",
    Prompts: f"{DATASET} prompt_column last_answer system_prompt max_prompt_length overlong_prompts saved",
    Preferences: f"{DATASET} prompt_column chosen_column rejected_column end_of_text saved",
    Chats: f"{DATASET} messages_column prompt_column completion_column text_column saved",
    GpuMeshVariables: "name env labels command cluster num_nodes devices_per_node device_memory_gib host_memory_gib"
    " kind node_kinds lease_directory mesh num_devices min_devices lease_wait_seconds max_restarts grace_seconds"
    " working_dir stream_output",
}
"""Saved blocks, deployments and work pools hold these names: renaming one breaks them."""


@pytest.mark.parametrize("block", BLOCKS)
class TestBlocks(BlockStandardTestSuite):
    """Prefect's own suite for blocks."""

    @pytest.fixture
    def block(self, request):
        return request.param

    def test_has_a_valid_image(self, block: type[Block]) -> None:
        """No logo: Prefect takes http addresses alone, which a UI without internet cannot show."""
        assert block._logo_url is None


def test_the_suite_sees_every_block_of_the_room():
    """A suite over no block would pass: each Block subclass defined here is in it."""

    def ours(kind):
        return {
            k for sub in kind.__subclasses__() for k in (sub, *ours(sub)) if k.__module__.startswith("prefect_rlhf")
        }

    assert ours(Block) == set(BLOCKS)


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_field_names_are_kept(kind):
    """Field names are as saved blocks, deployments and work pools have them."""
    assert set(kind.model_fields) == set(FIELDS[kind].split())


def test_every_job_variable_has_a_title_and_a_description_and_a_plain_type():
    """The form shows words for each field, and no field is nullable, which Prefect's form and templates mishandle."""
    properties = GpuMeshWorker.get_default_base_job_template()["variables"]["properties"]
    assert all(field["title"] and field["description"].endswith(".") for field in properties.values())
    assert [name for name, field in properties.items() if "type" not in field] == []


def test_job_template_passes_every_variable_on():
    """Each variable of the form reaches the configuration under its own name."""
    template = GpuMeshWorker.get_default_base_job_template()
    names = set(template["variables"]["properties"])
    assert {name: "{{ " + name + " }}" for name in names} == template["job_configuration"]


@pytest.mark.parametrize("kind", [Model, Prompts, Preferences])
@pytest.mark.parametrize("given", [{"path": "x", "pth": "y"}, {}, {"path": ""}, {"path": 3}, "x", None])
def test_bad_parameters_are_refused(kind, given):
    """A misspelt key, no path, a path of another type: a validation error, before anything runs."""
    with pytest.raises(ValidationError):
        kind.model_validate(given)


def test_parameters_are_frozen():
    """A run cannot change what it was given."""
    with pytest.raises(InvalidInput, match="expected a new group, since groups do not change: Model"):
        Model(path="x").path = "y"  # type: ignore[misc]


def test_a_saved_block_fills_fields_left_out(monkeypatch):
    """`saved` fills what is not given; what differs from its default stays as typed."""
    block = ModelBlock(path="models/big", head="scalar", dtype="float32", new_head=True)
    monkeypatch.setattr(ModelBlock, "load", lambda name, **_: block if name == "big" else None)
    expected = Model(path="models/big", head="scalar", dtype="float32", new_head=True, saved="big")
    assert expected == Model(saved="big")
    typed_in_form = {"path": "", "head": "lm", "dtype": "bfloat16", "new_head": False, "saved": "big"}
    assert expected == Model.model_validate(typed_in_form)
    assert Model(saved="big", path="models/own") == Model(path="models/own", saved="big")


def test_a_saved_block_gives_names_of_columns(monkeypatch):
    """A form sends an empty table of them, which is what was left out."""
    block = PromptsBlock(path="p.parquet", columns={"truth": "reward_model.ground_truth"})
    monkeypatch.setattr(PromptsBlock, "load", lambda name, **_: block)
    assert Prompts.model_validate({"path": "", "columns": {}, "saved": "sums"}).columns == block.columns


@pytest.mark.parametrize("columns", [{"truth": 3}, {"": "answer"}, {"truth": ""}, ["truth"], "truth"])
def test_columns_are_names(columns):
    with pytest.raises(InvalidInput, match="columns"):
        Prompts(path="x", columns=columns)


def test_a_block_is_taken_as_its_values():
    """Prefect's own references to blocks arrive as block objects."""
    block = PromptsBlock(path="p.parquet", split="held_out")
    assert Prompts(path="p.parquet", split="held_out") == Prompts.model_validate(block)


def test_values_of_the_graph():
    """A pair is two rows, a prompt or a chat one; a model keeps what was typed."""
    shape = TransformerShape(64, 128, 2, 4, 2, 16, 512, 128, 1e4, 1e-5, True)
    spec = Model(path="m", head="scalar", new_head=True).to_spec("critic", shape)
    assert (spec.role, spec.path, spec.head, spec.dtype, spec.new_head) == ("critic", "m", "scalar", "bfloat16", True)
    assert (
        Preferences(path="p").to_spec("a", 3).rows_per_item,
        Prompts(path="p").to_spec("b", 3).rows_per_item,
        Chats(path="p").to_spec("c", 3).rows_per_item,
    ) == (2, 1, 1)


def test_a_cluster_is_a_shape_in_bytes():
    """GiB become bytes, and a name that is no folder name is refused."""
    assert Cluster(device_memory_gib=1.5).shape.device_memory_bytes == (1 << 30) * 3 // 2
    with pytest.raises(ValidationError):
        Cluster(cluster="../elsewhere")


def test_gpus_without_a_stated_memory_have_their_own(driver, monkeypatch):  # noqa: F811
    """As the driver lists it, less what CUDA keeps. Without GPUs it is 8 GiB, and a stated value counts."""
    monkeypatch.setattr(cluster_module, "least_plan_bytes", cluster_module.least_plan_bytes.__wrapped__)  # keeps none
    driver(row(0), row(1))
    assert 78.4 < Cluster(kind="cuda", devices_per_node=2).shape.device_memory_bytes / (1 << 30) < 78.5
    assert Cluster(kind="cuda", device_memory_gib=8).shape.device_memory_bytes == Cluster().shape.device_memory_bytes
    driver("No devices were found")
    with pytest.raises(InvalidInput) as caught:
        _ = Cluster(kind="cuda").shape
    assert "\n" not in str(caught.value) and "No devices were found" in str(caught.value)
    assert Cluster(kind="cuda", device_memory_gib=40).shape.device_memory_bytes == 40 << 30
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InvalidInput, match="nvidia-smi, which names its GPUs, or device_memory_gib or node_kinds for"):
        _ = Cluster(kind="cuda").shape


def test_kinds_of_nodes_are_what_plans_and_leases_must_know_of_each():
    """GPUs by their datasheets, which may be overruled; nodes without GPUs by what is said of them."""
    kinds = [{"device": "a100-80", "num_nodes": 2}, {"device": "v100-32", "device_memory_gib": 30}]
    shape = Cluster(kind="cuda", devices_per_node=8, node_kinds=kinds).shape
    assert (shape.num_nodes, shape.node_devices) == (3, ("a100-80", "a100-80", "v100-32"))
    a100 = DATASHEETS["a100-80"].memory_bytes
    assert shape.node_memory_bytes == (a100, a100, 30 << 30) and shape.device_memory_bytes == 30 << 30
    assert shape.node_speeds == (1.0, 1.0, 0.401)
    kinds = [{"device": "A100-SXM4-80GB"}, {"device": "V100-32"}]
    assert Cluster(kind="cuda", node_kinds=kinds).shape.node_devices == ("a100-80", "v100-32")  # as drivers' labels are

    shape = Cluster(node_kinds=[{"device": "old", "speed": 1}, {"device": "new", "speed": 4}]).shape
    assert (shape.node_speeds, shape.node_memory_bytes) == ((0.25, 1.0), ())
    assert Cluster(num_nodes=2, node_kinds=[{"device": "new", "num_nodes": 2}]).shape.node_speeds == ()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_nodes": 3}, "num_nodes: got 3, expected no value, or the 2 nodes of node_kinds"),
        ({"kind": "cuda", "device_memory_gib": 40}, "device_memory_gib: got 40.0, expected no value: each of"),
        ({"kind": "cuda", "node_kinds": [{"device": "z9"}]}, "node_kinds.device: got 'z9', expected one of "),
        ({"kind": "cuda", "node_kinds": [{"device": "cpu"}]}, "node_kinds.device: got 'cpu', expected one of h100, "),
        (
            {"kind": "cuda", "node_kinds": [{"device": "H100"}, {"device": "h100"}]},
            "node_kinds.device: got ['h100', 'h100'], expected each kind once",
        ),
        ({"node_kinds": [{"device": "a", "speed": 1}, {"device": "b"}]}, "node_kinds.speed: got [1.0, 0.0], expected"),
        ({"node_kinds": [{"device": "a"}, {"device": "a"}]}, "node_kinds.device: got ['a', 'a'], expected each kind"),
        (
            {"node_kinds": [{"device": "a", "speed": 1e-5}, {"device": "b", "speed": 1}]},
            "node_kinds.speed: got [0.0, 1.0], expected numbers above 0",
        ),
    ],
)
def test_kinds_of_nodes_that_contradict_are_refused(fields, says):
    two = {"node_kinds": [{"device": "a100-80"}, {"device": "v100-32"}]}
    with pytest.raises(InvalidInput) as caught:
        _ = Cluster(**(two | fields)).shape
    assert str(caught.value).startswith(says)


def test_kinds_of_nodes_reach_the_lease_of_a_run():
    """From the worker's configuration to the process of the flow run, for the nodes that it holds."""
    kinds = [{"device": "fast", "speed": 2}, {"device": "slow", "speed": 1}]
    configuration = GpuMeshWorker.job_configuration(node_kinds=kinds, command="", env={})
    whole, second = (configuration.lease("1", DeviceMesh.parse(mesh)) for mesh in ("n0-1:0-1", "n1:0-1"))
    assert Lease.from_json(configuration.environment(whole)[ENVIRONMENT_VARIABLE]) == whole
    assert (whole.node_devices, second.node_devices) == (("fast", "slow"), ("slow",))
    assert whole.cluster.node_speeds == (1.0, 0.5)


def test_a_misspelt_job_variable_is_refused():
    """Prefect ignores job variables that a pool does not have; this worker names them."""
    template = GpuMeshWorker.get_default_base_job_template()
    configuration = GpuMeshWorker.job_configuration
    with pytest.raises(InvalidInput, match="job_variables: got 'clutser', expected one of cluster"):
        asyncio.run(configuration.from_template_and_values(template, {"clutser": "x"}, client=None))


@pytest.mark.parametrize(("kind", "seen"), [("cpu", ""), ("cuda", "6,7")])
def test_a_run_sees_its_own_gpus_of_the_list_of_its_worker_and_on_cpu_no_gpu(kind, seen):
    """Its gang gives each rank a GPU of the list that is left. Megatron and vLLM ask torch for GPUs themselves."""
    own = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    configuration = GpuMeshWorker.job_configuration(
        kind=kind, devices_per_node=4, device_memory_gib=8, command="", env=own
    )
    lease = configuration.lease("1", DeviceMesh.parse("n0:2-3"))
    assert configuration.environment(lease)["CUDA_VISIBLE_DEVICES"] == seen
    assert lease.gpus == ((0, 1) if kind == "cuda" else (2, 3))


def test_a_lease_has_the_kind_of_its_cluster_block(tmp_path):
    """Of a block in Python and of a pool's form; what a run may state beside it is in tests/flows."""
    for kind in ("cpu", "cuda"):
        with lease(Cluster(kind=kind, device_memory_gib=8).shape, 1, directory=tmp_path / kind) as leased:
            assert leased.kind == leased.cluster.backend == kind
        configuration = GpuMeshWorker.job_configuration(kind=kind, device_memory_gib=8, command="", env={})
        assert configuration.lease("1", DeviceMesh.parse("n0:0")).kind == configuration.shape.backend == kind


def test_a_worker_refuses_a_kind_that_its_engines_are_not_built_for(tmp_path):
    """Before devices are locked and a process starts. Another interpreter may have other engines."""
    own = {"kind": "cuda", "device_memory_gib": 8, "lease_directory": str(tmp_path), "env": {}}
    taken = TakenRun.take(GpuMeshWorker.job_configuration(command="", **own))
    with pytest.raises(InvalidInput, match="kind: got 'cuda', expected cpu, for which torch .* is built; `make setup-"):
        taken.take_devices()
    assert taken.devices == ()
    taken.release()
    taken = TakenRun.take(GpuMeshWorker.job_configuration(command="/opt/python -m attempt", **own))
    assert taken.take_devices() is None and len(taken.devices) == 2
    taken.release()
