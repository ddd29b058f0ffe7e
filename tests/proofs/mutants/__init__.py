"""Bugs that are planted on purpose, to prove the tests that should notice them."""
