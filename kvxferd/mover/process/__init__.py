"""The mover's process: the forkserver that forks it, its loop, and the memory that it binds.

Runs in the forkserver, in each child mover, and in a resident mover's thread. Begin with `loop`. It may
import `reads` and the rooms below, and nothing of `supervisor`.
"""
