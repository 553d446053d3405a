"""Steps of ours and of TRL's that do the same work on the same machine."""
