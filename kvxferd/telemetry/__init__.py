"""Metrics, logs and a short history of one node. Nothing here affects the data path.

`metrics` declares every metric in one table, `FAMILIES`. `logs` is the log, `history` keeps the last records
and `samples` the last 15 minutes; `warnings` finds what an operator should mend, and `overview` sums up.
"""
