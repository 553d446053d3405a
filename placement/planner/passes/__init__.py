"""What the planner does, one after another, with the plans that its searches found."""
