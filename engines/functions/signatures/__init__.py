"""Signatures of plays: a person's coroutine, tools or environment, each called as a play."""
