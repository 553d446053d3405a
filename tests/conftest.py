"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# machines that run the tests are shared and slow at times; how long an example takes is no promise of ours
settings.register_profile("shared", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("shared")
