"""Where the cache's memory lies, and how the daemon gets it.

`rank_sharing` shares and registers a rank with the first placement that works; read it first.
`gpu_placement` has the order of placements and why each failed, `memory_sharing` does one, `bounce_buffers`
copies what cannot be shared, and `cache_pool` is memory that vLLM allocates from so that it can be exported.
"""
