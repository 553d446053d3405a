"""A census of vLLM's module globals: each is an engine's own, or is listed here with the reason why engines share it.

An engine that finds another engine's state sums over the wrong ranks, or reads memory that is gone.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding

from prefect_rlhf.engines.vllm.group import OF_AN_ENGINE, RankGroup

pytestmark = pytest.mark.slow
FOLDERS = "distributed", "v1/worker", "model_executor/layers/rotary_embedding"
SHARED = {
    "distributed/device_communicators/all_reduce_utils.py": {
        "_gpu_p2p_access_cache": "which GPUs of the host reach each other",
    },
    "distributed/device_communicators/flashinfer_all_reduce.py": {
        "_fi_ar_workspace": "never made: `settle` and `engine_arguments` switch FlashInfer's all-reduce off",
        "_fi_ar_workspace_failed": "see _fi_ar_workspace",
        "_fi_ar_workspace_groups": "see _fi_ar_workspace",
        "_fi_ar_quant_workspace": "see _fi_ar_workspace, and no model is quantized",
        "_fi_ar_quant_workspace_failed": "see _fi_ar_workspace",
    },
    "distributed/device_communicators/pynccl.py": {
        "_NCCL_SYMM_OPS_REGISTERED": "VLLM_USE_NCCL_SYMM_MEM is off by default",
    },
    "distributed/device_communicators/pynccl_allocator.py": dict.fromkeys(
        (
            "_allocator",
            "_allocator_wrapper",
            "_cached_pool_snapshot",
            "_graph_pool_id",
            "_mem_pool",
            "_nccl_allocator_failed_to_compile",
            "_registered_base_addrs",
        ),
        "VLLM_USE_NCCL_SYMM_MEM is off by default",
    ),
    "distributed/device_communicators/shm_tensor_arena.py": {"_TENSOR_ARENAS": "of an engine in several processes"},
    "distributed/ec_transfer/ec_connector/mooncake_store_embedding/store_client.py": {
        "_UNSAFE_CLIENTS": "of encoders in other processes",
    },
    "distributed/ec_transfer/ec_transfer_state.py": {"_EC_CONNECTOR_AGENT": "of encoders in other processes"},
    "distributed/elastic_ep/standby_state.py": dict.fromkeys(
        ("_STANDBY_DP", "_STANDBY_EP", "_STANDBY_EPLB", "_STANDBY_WORLD", "_STANDBY_WORLD_NODE_COUNT"),
        "of experts on a changing number of ranks",
    ),
    "distributed/kv_transfer/kv_transfer_state.py": {"_KV_CONNECTOR_AGENT": "of caches in other processes"},
    "distributed/kv_transfer/kv_connector/v1/lmcache_integration/utils.py": {"_config_instance": "of LMCache"},
    "distributed/kv_transfer/kv_connector/v1/lmcache_integration/vllm_v1_adapter.py": {
        "tmp_disagg_tracker": "of LMCache",
    },
    "v1/worker/gpu/buffer_utils.py": {"_DEFAULT_MAX_CONCURRENCY": "equal for all engines: steps in flight"},
    "v1/worker/ubatching.py": dict.fromkeys(
        ("_CURRENT_CONTEXTS", "_NUM_UBATCHES", "_THREAD_ID_TO_CONTEXT"), "of a step that is cut in two, which is off"
    ),
}


def globals_of(file: Path) -> Iterator[str]:
    """The globals that functions of a module assign, and its containers that are empty when it is imported."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if is_empty_container(getattr(node, "value", None)):
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def is_empty_container(value: ast.expr | None) -> bool:
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in ("dict", "list", "set", "defaultdict", "deque", "OrderedDict", "WeakValueDictionary")
    return False


def test_every_module_global_of_vllm_is_an_engines_own_or_listed():
    root = Path(vllm.__file__).parent
    found = {
        (str(file.relative_to(root)), name)
        for folder in FOLDERS
        for file in (root / folder).rglob("*.py")
        for name in globals_of(file)
    }
    own = {(str(Path(module.__file__).relative_to(root)), name) for module, name in OF_AN_ENGINE}
    listed = {(file, name) for file, names in SHARED.items() for name in names}
    assert found - own - listed == set()
    assert listed - found == set(), "it is no longer a global of vLLM"
    assert listed & own == set()
    assert ("distributed/parallel_state.py", "_TP") in found & own


def test_engines_have_tables_of_their_own():
    """Also their names of groups, which compiled code contains."""
    first, second, before = RankGroup((0,), 0), RankGroup((0,), 0), parallel_state._groups
    seen = []
    for group in (first, second, first):
        with group.entered():
            seen.append((parallel_state._get_unique_name("tp"), parallel_state._groups, rotary_embedding._ROPE_DICT))
            parallel_state._groups["tp:0"] = rotary_embedding._ROPE_DICT["key"] = group
    assert [name for name, *_ in seen] == ["tp:0", "tp:0", "tp:1"]
    assert [groups["tp:0"] for _, groups, _ in seen] == [first, second, first]
    assert [tables["key"] for *_, tables in seen] == [first, second, first]
    assert parallel_state._groups is before
    assert not rotary_embedding._ROPE_DICT
