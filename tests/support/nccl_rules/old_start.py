"""Imported by a rank after `tests.support.nccl_rules.ranks`: the start of ranks before finding A1 was fixed."""

from prefect_rlhf.engines.gang.processes import rank_process

rank_process.open_communicators = lambda groups: None
