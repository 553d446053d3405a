"""vLLM as generation engine inside rank processes: an engine per tensor-parallel group, weights written in place."""

from prefect_rlhf.engines.vllm.environment import settle

settle()  # vLLM and torch._dynamo read these when they are first imported
