"""The planner's passes, which improve the plans that its searches found."""
