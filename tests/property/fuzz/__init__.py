"""Whatever bytes arrive: targets that hypothesis tries in `make test` and atheris in `make proofs`."""
