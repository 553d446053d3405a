"""Prefect blocks and the gpu-mesh worker: what a person types once in the UI or CLI.

Importing this room registers them: Prefect does so through the entry point group `prefect.collections`.
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
