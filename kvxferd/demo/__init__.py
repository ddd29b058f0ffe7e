"""`kvxferd demo`: two daemons, two engines of real processes, and a check of every byte that moved.

`runner` starts everything and moves request after request; `rank` is what runs in a rank's process, and
`report` the outcome.
"""
