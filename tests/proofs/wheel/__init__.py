"""What the built wheel gives a user, in fresh environments of the locked versions."""
