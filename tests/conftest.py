"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# Machines that run the tests are shared and slow at times; how long an example takes is no promise of ours.
settings.register_profile("search", deadline=None, suppress_health_check=list(HealthCheck))
# The same tree has the same result each time; `pytest --hypothesis-profile=search` looks for new examples.
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")
