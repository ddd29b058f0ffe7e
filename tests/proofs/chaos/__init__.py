"""Faults against real daemons, movers, workers and NIXL while requests run: `make chaos`."""
