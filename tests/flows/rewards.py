"""Reward functions of tests: a person's own file."""


def shorter(row):
    """Fewer characters are better; what the dataset says of the row is there."""
    assert row["hint"] == f"hint {row['number']}"
    return -float(len(row["response"]))


def vowels(completions, **columns):
    """As TRL calls it."""
    assert len(columns["number"]) == len(completions)
    return [float(sum(letter in "aeiou" for letter in completion)) for completion in completions]


def raises(row):
    """Fail on every row."""
    raise ValueError(f"no reward for {row['number']}")


def last_word(row):
    """Right if the response has more than two words; its answer is the last of them."""
    words = row["response"].split()
    return {"score": float(len(words) > 2), "answer": words[-1] if words else None, "words": len(words)}


def spread(row):
    """More for different tokens, less for many."""
    ids = row["response_ids"]
    return len(set(ids)) - 0.25 * len(ids) + 0.1 * (sum(ids) % 7)
