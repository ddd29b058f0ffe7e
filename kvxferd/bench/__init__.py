"""`kvxferd bench`: the cost of a daemon against NIXL inside the engine, interleaved in one run.

`runner` starts both sides (`testbed`, on `hosts`) and takes every measure of `measures/`, in which the
`implementations` take turns (`rounds`). Commands to the child processes are in `protocol`, those to
another machine in `remote_protocol`. `figures` and `report` turn points into results.
"""
