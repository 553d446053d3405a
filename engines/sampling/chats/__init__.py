"""Chats as tokens: the chat template, the end of an answer, and texts of others, which never become control tokens."""
