"""What `kvxferd doctor` looks at, `kvxferd ping`, and `kvxferd support-bundle`.

Read `report` first: the table of checks, what each returns, and how it is printed. The checks are functions
in `host`, `network`, `gpu`, `software` and `daemon`; what may crash or hang runs in a child process
(`isolated`). `nixl_read` reads between two processes, `gpu_placements` tries GPU memory through a daemon.
Another node: `ping` reaches it, `link` measures pulls.
"""
