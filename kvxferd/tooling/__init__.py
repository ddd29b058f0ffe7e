"""What bench, demo, doctor, explain and the command line share.

`subprocesses` starts daemons and child processes and ends them: `CommandProcess` sends typed commands
(`line_protocol`) to a module that runs `command_loop`, and `isolated_process` runs a module that may crash or
hang. `event_waiter` waits for a rank's events. `control_client` talks to a daemon, `output` prints.
"""
