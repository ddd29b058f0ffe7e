"""`make wheel-test`: what the built wheel gives a user, in fresh environments, with the locked versions."""
