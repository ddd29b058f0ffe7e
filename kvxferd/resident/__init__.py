"""A rank whose mover is a thread of its own worker, for memory that no other process can map.

That is a GPU's memory from plain `cudaMalloc` (torch's default allocator), or host memory that is no
memfd. Registering it looks like registering any other::

    client = kvxferd.client.connect("/run/kvxferd/worker/worker.sock")
    rank = kvxferd.resident.register(client, EngineSpec(...), RankLayout(...), {"kv": kv_cache_tensor})

and returns the same `RankHandle`; `resume` takes `memory_of(tensor)`. The daemon decides everything, as it
does for a child mover. The differences for the engine are:

* The transfer library is imported here, by the first `register`: 0.1 s where torch is imported already.
  It may set `NIXL_LOG_LEVEL`, and `HOME` where there is none to read.
* The mover holds the interpreter's lock for short times, and releases it between them. Making and ending
  its agent hold it for longer (docs/evidence/benchmarks.md); that happens when the rank is registered,
  suspended, resumed or closed, and when the daemon was restarted.
* A thread cannot be killed. Where the library hangs, `Suspended` does not come and blocks of pulls in
  doubt stay out of use until this process exits; the daemon logs that.
* **Free the memory only after `Suspended`**, or after `close` has left `RankHandle.memory_in_use` False:
  a source that is unmapped while it is read over TCP kills its process, which is the engine.
* A crash inside the library crashes the engine.

It may import the client, a mover's `process` and `transport`, and nothing of the daemon's side.
"""

from kvxferd.resident.registration import memory_of, register

__all__ = ["memory_of", "register"]
