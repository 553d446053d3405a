"""Reports the progress of a run that a person stopped, and the checkpoint to continue from."""

from prefect.exceptions import TerminationSignal

from prefect_rlhf.errors.errors import RunStopped
from prefect_rlhf.files.remote_path import shown
from prefect_rlhf.tasks.checkpoints.folders import newest_finished
from prefect_rlhf.tasks.running.training_run import TrainingRun


def stopped_run(run: TrainingRun, error: BaseException) -> RunStopped:
    """Return the error for the person that stopped a run, with its last step and newest checkpoint.

    `error` is the exception that stopped it.
    """
    began = run.checkpoint.folder if run.checkpoint else None
    newest = newest_finished(run.run_dir) or began
    if newest is not None:
        found = f"newest checkpoint: step {int(newest.name.removeprefix('step-'))}"
    elif run.checkpoint_every is not None:
        found = f"no checkpoint yet (checkpoint_every={run.checkpoint_every})"
    else:
        found = "no checkpoint: a run with checkpoint_every can continue"
    metrics = run.run_dir / "metrics.jsonl"
    done = sum(1 for _ in metrics.open()) if metrics.is_file() else 0
    how_far = f"stopped after {done} of {run.num_steps} steps; {found}"
    folder = None if newest is None else shown(newest)
    return RunStopped(how_far, folder, is_terminated=isinstance(error, TerminationSignal))
