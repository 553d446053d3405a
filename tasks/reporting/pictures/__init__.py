"""Plans, schedules and sweeps as text and SVG."""
