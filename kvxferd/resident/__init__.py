"""A rank whose mover is a thread of its own worker, for memory that no other process can map.

That is a GPU's memory from plain `cudaMalloc` (torch's default allocator), or host memory that is no
memfd. Registering it looks like registering any other::

    client = kvxferd.client.connect("/run/kvxferd/worker/worker.sock")
    rank = kvxferd.resident.register(client, EngineSpec(...), RankLayout(...), {"kv": kv_cache_tensor})

and what comes back is the same `RankHandle`; `resume` takes `memory_of(tensor)`. The daemon decides
everything, as it does for a child. What differs for the engine:

* The transfer library is imported here, by the first `register`: 0.1 s where torch is imported already.
  It may set `NIXL_LOG_LEVEL`, and `HOME` where there is none to read.
* The mover takes the interpreter's lock for moments, and gives it up between them. Making and ending
  its agent hold it for longer (docs/evidence/benchmarks.md); that happens when the rank is registered,
  suspended, resumed or closed, and when the daemon was restarted.
* A thread cannot be killed. Where the library hangs, `Suspended` does not come, blocks of pulls in
  doubt stay out of use, and the daemon says so, until this process exits.
* **Memory goes only after `Suspended`**, or after `close` has left `RankHandle.may_be_touched` False:
  a source that is unmapped while it is read over TCP kills its process, and that is the engine.
* A crash inside the library is the engine's crash.
"""

from kvxferd.resident.registration import memory_of, register

__all__ = ["memory_of", "register"]
