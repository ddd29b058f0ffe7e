"""The daemon's side of movers: processes, handles, the forkserver's client, the reader of its standard error.

What becomes of movers is decided in `kvxferd.core.ranks`. This runs in the daemon's event loop. It imports
neither torch nor nixl, and nothing of `process` or `transport`.
"""
