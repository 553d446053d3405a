"""How good the planner's answers are: rivals, closed problems, regret, and predicted beside measured steps."""
