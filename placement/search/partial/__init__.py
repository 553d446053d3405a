"""Partial and complete plans in compiled form: what is decided, whether it can lie, how long it takes."""
