"""What-if questions: a plan for any cluster, and its answer for people and machines."""
