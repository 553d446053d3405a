"""The Prefect server may go away: requests wait for it, and what it lost of task runs is sent again."""
