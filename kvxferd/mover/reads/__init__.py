"""Pulls inside a mover: expanded, posted fairly, read, and reported once the fence word is read.

Begin with `pull_engine`, which has the order of a pull's steps and what a failed read proves. `pull_state` is
one pull. `covering_reads` reads through `chunks`. Nothing here knows the daemon's socket or the process:
`process` calls `step`, and sends what is in the outbox.
"""
