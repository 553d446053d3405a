"""Which region of which parameter each device holds, and how one layout becomes another."""
