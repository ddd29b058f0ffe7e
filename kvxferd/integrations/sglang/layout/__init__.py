"""Descriptions of SGLang's pools: `pools` has the describers, `support` the table of every pool.

Neither imports SGLang: a pool is known by its class's name, and its shapes are its tensors'.
"""
