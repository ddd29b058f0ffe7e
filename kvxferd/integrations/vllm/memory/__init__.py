"""Memory for the cache: `cache_pool` is where vLLM allocates it, so that another process can map it.

`placement_advice` says what mends a placement that does not work.
"""
