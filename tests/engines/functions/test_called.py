"""A person's function may have any names for its arguments."""

import asyncio

from prefect_rlhf.engines.functions.signatures.called import called


def test_arguments_may_have_the_names_that_our_own_code_uses():
    def weather(place: str, function: str) -> str:
        return f"{function} in {place}"

    assert asyncio.run(called(weather, "weather.py:3", place="Rome", function="rain")) == "rain in Rome"
