"""Pure values and functions: graph, mesh, strategy, plan, augmented graph. No Prefect, no torch, nothing else of ours."""
