"""What is long, or wants the machine alone: `make proofs` runs it. `__main__` has the table."""
