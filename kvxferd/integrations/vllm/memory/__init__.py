"""Where the cache's memory lies, and how the daemon gets it.

`memory_sharing` shares a rank's memory in one placement, for `kvxferd.engine`, which registers the rank with
the first that works; read it first. `gpu_placement` has their order and what mends each, `bounce_buffers`
copies what cannot be shared, and `cache_pool` is memory that vLLM allocates from so that it can be exported.
"""
