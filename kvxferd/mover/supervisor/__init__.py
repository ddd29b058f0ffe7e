"""The daemon's side of movers: pools, handles, the forkserver's client and the reader of its standard error.

Runs in the daemon's event loop. It imports neither torch nor nixl, and nothing of `process` or `transport`.
"""
