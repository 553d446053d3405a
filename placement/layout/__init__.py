"""Layouts: the region of each parameter that each device holds, and how one layout becomes another."""
