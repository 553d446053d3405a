"""Plays for runs of tiny models."""


async def counts(row, say):
    """Two turns; short turns are better, and the second turn counts twice."""
    said = await say()
    say.reward(-0.1 * len(said.tokens))
    said = await say(f" the {row['number'] % 3 and 'film' or 'best film'}")
    return {"score": -0.2 * len(said.tokens), "characters": len(said.text)}


async def guesses(row, say):
    """A task of the group: rows of a prompt have the same secret."""
    secret = row["group_seed"] % 5
    said = await say()
    while said.end == "stop" or said.turn < 1:
        said = await say(" a good film")
        if said.end == "budget":
            break
    return {"score": float(len(said.tokens) % 5 == secret), "secret": float(secret)}


async def dies(row, say):
    await say()
    raise RuntimeError("the environment is gone")


def film_of(number: int) -> str:
    """the best film

    Args:
        number: The number of a film.
    """
    return "best_film" if number >= 0 else "bad"


def answers(row):
    """The number of answers of tools."""
    return float(sum(message["role"] == "tool" for message in row["messages"]))
