"""The mover itself: the forkserver that forks it, its loop, the memory that it binds, and its pull engine.

Runs in the forkserver, in each child mover, and in a resident mover's thread. It may import `transport` and
the modules beside the rooms, and nothing of `supervisor`.
"""
