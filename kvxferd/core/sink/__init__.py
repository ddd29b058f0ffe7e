"""What this node reads: pulls, from a worker's request to its end.

Read `pulls` first, whose header says how a pull goes on. `grants` asks the source, and `manifests` learns its
layout.
"""
