"""Attacks on real daemons while honest engines go on: `make hostile`."""
