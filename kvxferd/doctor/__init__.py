"""The checks of `kvxferd doctor`, one module each; `runner` lists and runs them.

A check yields findings (`finding`), which `report` prints. What may crash or hang runs in a child process
(`isolated`): the driver's report in `gpus`, `nixl_read_process` and `placement_trial`.
"""
