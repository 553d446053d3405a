"""Evaluation on held-out data: sets of prompts with samples and intervals, pairs for reward models, losses on chats."""
