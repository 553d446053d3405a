"""What-if questions: a plan for a cluster that need not be there, and its answer for people and machines."""
