"""Other daemons: who they are, what is asked of them, and what they send of their ranks.

Read `peers` first; `requests` is what waits for a reply.
"""
