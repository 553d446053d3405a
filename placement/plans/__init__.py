"""Plans before they are estimated: files, presets, completion, and checks that a plan may run."""
