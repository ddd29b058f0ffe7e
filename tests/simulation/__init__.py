"""The simulated world: the real daemon, client and movers over a kernel, a network and a clock of its own."""
