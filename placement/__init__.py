"""Values and pure functions of planning, and helpers for files and errors. No Prefect, no torch, no other room."""
