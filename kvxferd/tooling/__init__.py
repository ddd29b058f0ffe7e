"""What bench, demo, doctor, explain and the command line share.

`child_process` has a Python object in a process of its own, and `daemon_process` a daemon in a directory;
neither outlives the tool. `engine_pair` says what two engines of a model look like, `engine_process` is one
rank of such an engine, and `content` the bytes by which it is checked. `control_client` talks to a daemon,
`output` prints.
"""
