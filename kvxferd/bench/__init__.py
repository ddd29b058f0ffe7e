"""`kvxferd bench`: the cost of a daemon against NIXL inside the engine, interleaved in one run.

All contenders move between the same two pieces of memory, or page sizes and placement would be compared
too. A ratio is taken within a round, and every other round goes backwards: a machine that slows down slows
both. Outside their own turns, processes with progress threads are stopped, because each holds a core. Each
contender's first move is of new content and compared whole; later ones by the ends of blocks. A small
pull that still waits when the large one ends counts with all of its time; left out, a mover that starved
small pulls would have the best ratio. Absolute figures of two runs cannot be compared, their ratios can.

Read `runner` first: it takes every measure of `measures/`, in which `contenders` take turns to move `cases`
on a `testbed`. What is timed runs in child processes (`rank`, `baselines`). `figures` has the results, and
`report` shows them. Both sides are on this machine; `kvxferd doctor --serve` measures a link to another.
"""
