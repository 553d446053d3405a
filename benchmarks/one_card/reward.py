"""The reward of both halves, without a model."""


def even(completions: list[str], **_: object) -> list[float]:
    """Return the share of even digits of each text, as TRL calls a reward."""
    return [sum(letter in "02468" for letter in text) / max(1, len(text)) for text in completions]
