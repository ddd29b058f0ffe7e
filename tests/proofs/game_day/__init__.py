"""Faults on two real daemons with traffic, and what an operator sees of each: `make proofs ONLY=game-day`."""
