"""PPO's critic: a model of its own, or a scalar head on the actor's trunk."""

from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput, Missing, NotUsed
from prefect_rlhf.tasks.rl.settings.online import PPO
from prefect_rlhf.tasks.settings import Optimizer


def check_critic(actor: Model, critic: Model | None, algo: PPO) -> None:
    """Raise InvalidInput for a missing or needless critic, and for settings that have no effect."""
    if "lm" not in actor.head:
        raise InvalidInput("actor.head", actor.head, "lm, or lm+scalar: the actor generates")
    shared, plain = "scalar" in actor.head, PPO()
    if critic is None and not shared:
        raise Missing("critic", "a model; or set actor.head: lm+scalar, for values of the actor's own trunk")
    if critic is not None and shared:
        raise NotUsed("critic", critic.path, f"actor.head is {actor.head}, so the actor computes the values")
    unread = "critic_optimizer" if shared else "value_weight"
    stated = getattr(algo, unread)
    if stated != getattr(plain, unread):
        reason = "actor_optimizer trains both heads" if shared else "it weighs the values of a shared trunk"
        seen = stated.model_dump(exclude_unset=True) if isinstance(stated, Optimizer) else stated
        raise NotUsed(f"algo.{unread}", seen, reason)
