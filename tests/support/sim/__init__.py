"""What every simulation of nodes stands on: a real core whose shell is a test's, and virtual time.

`node.py` has the one place that knows every effect of the core. `schedule.py` has the order of what is to
happen. A subclass of `SimNode` is a shell: unit tests' `Host`, a daemon of the simulation, the model's
host, a node of `benchmarks/scaling`.
"""
