"""Signatures of plays: your coroutine, tools or environment, each called as a play."""
