"""Chats as tokens: the chat template, the end of an answer, and foreign texts, which never become control tokens."""
