"""Plans before they are estimated: files, presets, completion, and the check that a plan may run."""
