"""`kvxferd demo`: two daemons, two engines of real processes, and a check of every byte that moved.

`runner` starts everything and sends the workers (`worker`) the commands of `protocol`; `content` is the
byte check, `results` and `report` the outcome.
"""
