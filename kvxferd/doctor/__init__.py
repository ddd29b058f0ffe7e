"""The checks of `kvxferd doctor`, one module each; `runner` lists and runs them.

A check yields findings (`finding`), which `report` prints. A check that may crash or hang runs in a
child process: `nixl_read_process`, `gpu_query_process` and `placement_trial`.
"""
