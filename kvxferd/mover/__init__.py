"""Movers: the processes that own NIXL agents, and the daemon's side of them.

`supervisor` runs in the daemon: it starts the forkserver, keeps movers ready and hands them out.
`process` runs in the forkserver, in each mover, and in a resident mover's thread. It drives the pulls of
`reads`, which use `chunks`, memory of the mover's own. `transport` reads memory through the transfer library,
and by copies where the library cannot reach it.

The modules beside the rooms are what several of them share.
"""
