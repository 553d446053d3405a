"""Pure values and functions: graph, mesh, strategy, plan, augmented graph. No Prefect, no torch, no other room."""
