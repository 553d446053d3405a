"""The last lines of a completed run."""

from prefect_rlhf.flows.commands.next_steps import next_steps


def test_the_command_of_the_next_run_sets_each_parameter_once():
    """A model that was trained further replaces the earlier one; a value set twice would be refused."""
    command = ["prefect-rlhf", "run", "ppo", "-p", "actor.path=old", "-p", "steps=2", "-p", "critic.path=older"]
    *_, following = next_steps(command, {"actor": "new"})
    assert following == "next:  prefect-rlhf run ppo -p steps=2 -p critic.path=older -p actor.path=new"
