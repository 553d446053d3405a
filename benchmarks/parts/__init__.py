"""What single parts of a run cost: checkpoints, moves of weights, orchestration, checks, one train_step."""
