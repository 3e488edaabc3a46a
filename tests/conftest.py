"""Settings that all tests share."""

from hypothesis import settings

# The same examples in every run, and no clock: a busy machine must not fail a test.
settings.register_profile("fedsync", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fedsync")
