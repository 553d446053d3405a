"""Two automations of a Prefect server: send a message if a run fails, and suspend a run whose policy moves too far.

`python docs/examples/automations.py BLOCK` creates them, with a saved notification block such as `slack-webhook/team`.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from uuid import UUID

from prefect.automations import Automation
from prefect.blocks.core import Block
from prefect.events.actions import SendNotification, SuspendFlowRun
from prefect.events.schemas.automations import EventTrigger, Posture

OF_RLHF = {"prefect.resource.role": "flow", "prefect.resource.name": "rlhf"}


def on_crash(notifier: UUID) -> Automation:
    """Send a message when a run of the flow `rlhf` crashed or failed; the state's message is a line with the cause."""
    return Automation(
        name="RLHF run crashed or failed",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Crashed", "prefect.flow-run.Failed"},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=OF_RLHF,
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[notice(notifier, "{{ flow_run.name }} is {{ flow_run.state.name }}", "{{ flow_run.state.message }}")],
    )


def on_metric_above_limit(metric: str, notifier: UUID) -> Automation:
    """Suspend a run when a metric exceeds its value in the run's `limits`.

    The run ends its step and writes a checkpoint. A person may resume it.
    """
    return Automation(
        name=f"{metric} above its limit",
        trigger=EventTrigger(
            expect={"prefect-rlhf.metric.above-limit"},
            match={"prefect.resource.id": "prefect.flow-run.*", "prefect-rlhf.metric": metric},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            SuspendFlowRun(),
            notice(notifier, f"{metric} is above its limit", "{{ flow_run.name }} is suspended: {{ event.payload }}"),
        ],
    )


def notice(notifier: UUID, subject: str, body: str) -> SendNotification:
    """Return the action that sends a message by a saved notification block."""
    return SendNotification(block_document_id=notifier, subject=subject, body=body)


if __name__ == "__main__":
    block = Block.load(sys.argv[1], _sync=True)._block_document_id
    for automation in (on_crash(block), on_metric_above_limit("kl_penalised_rewards.kl", block)):
        automation.create(_sync=True)
