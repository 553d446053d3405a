"""Makes the reference of a shipped flow follow the policy, if its settings say so."""

from prefect_rlhf.errors.errors import NotUsed
from prefect_rlhf.tasks.settings import MovingReference
from prefect_rlhf.tasks.tracing.calls import follow


def move_reference(
    ref: object | None, actor: object, settings: MovingReference, parameter: str = "algo.follow"
) -> None:
    """Let `ref` follow `actor` if `settings` say so; `parameter` is the name of these settings.

    Raises NotUsed for settings without a reference that could follow.
    """
    if settings.every is None:
        return
    if ref is None:
        raise NotUsed("algo.follow.every", settings.every, "no ref is set, so no model would follow", "set ref")
    follow(ref, actor, every=settings.every, share=settings.share)
