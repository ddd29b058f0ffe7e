"""What is read at a time, and memory of the mover's own between the network and the engine's blocks.

Begin with `chunk_pool`, which has the states of a chunk. `slices` cuts runs, and `covering` fills chunks with
stretches. `scatterer` copies from a chunk into host memory, and `device_scatter` into a GPU's. Nothing here
knows a pull.
"""
