"""What holds for every test."""

from hypothesis import settings

# The machines are shared: how long one example takes says nothing about the code.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
