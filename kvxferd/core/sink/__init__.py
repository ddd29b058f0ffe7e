"""What this node reads: pulls, from a worker's request to its end.

Read `pulls` first, whose header says how a pull goes on, and `need_of` in `pull`. `grants` asks the source,
`manifests` learns its layout, and `plans` has the reads.
"""
