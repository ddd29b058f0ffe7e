"""Reading memory: the contract of a transport, NIXL behind it, and staging where NIXL cannot reach memory.

It imports nothing of `process` or `supervisor`, and can be tested without either.
"""
