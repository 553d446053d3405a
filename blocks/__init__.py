"""Prefect blocks, which are settings that you enter once in the UI or CLI, and the gpu-mesh worker.

Prefect imports this room through the entry point group `prefect.collections`, which registers them.
"""

from prefect_rlhf.blocks.chats import Chats, ChatsBlock
from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.blocks.dataset import Preferences, PreferencesBlock, Prompts, PromptsBlock
from prefect_rlhf.blocks.model import Model, ModelBlock
from prefect_rlhf.blocks.rated_answers import RatedAnswers, RatedAnswersBlock
from prefect_rlhf.blocks.worker.worker import GpuMeshWorker

__all__ = [
    "Chats",
    "ChatsBlock",
    "Cluster",
    "GpuMeshWorker",
    "Model",
    "ModelBlock",
    "Preferences",
    "PreferencesBlock",
    "Prompts",
    "PromptsBlock",
    "RatedAnswers",
    "RatedAnswersBlock",
]
