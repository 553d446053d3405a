"""The passes of the planner, which improve the plans that its searches found."""
