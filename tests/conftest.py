"""What all tests share."""

from hypothesis import settings

# The same examples at every run; no limit on time, since a kernel compiles at its first call.
settings.register_profile("millrace", deadline=None, derandomize=True)
settings.load_profile("millrace")
