"""Attacks on real daemons while an honest pair of engines goes on: `make hostile`."""
