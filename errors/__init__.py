"""Errors that a person can fix, and the text of messages and tables. Imports no room."""
