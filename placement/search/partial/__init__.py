"""Partial and complete plans as arrays, compiled: decisions, packing on the devices, schedules."""
