"""Real daemons and rank processes for tests. Read `fleet` first.

fleet: what a session shares, and what one test has of it; daemon: `kvxferd serve`, and whether it is at
rest; rank_process: a rank as a test calls it, of which `agent` is what runs there and `stores` its memory;
requests: what is published and pulled, byte for byte.
"""
