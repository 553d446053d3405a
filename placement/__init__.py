"""Values and pure functions of planning. No Prefect, no torch, no file is written; imports only the ground rooms."""
