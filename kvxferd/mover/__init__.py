"""Movers: the processes that own NIXL agents, and the daemon's side of them.

In the daemon (neither torch nor nixl): `pool` hands out `handle`s; `launch` runs the parent.
In the parent: `parent` imports the library once and forks. In a mover: `child` sets the process
up, `loop` serves the daemon, `binding` maps memory, `pulls` reads through a `transport`.
"""
