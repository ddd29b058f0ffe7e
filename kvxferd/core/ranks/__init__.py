"""The engines here, their ranks and the movers that serve them.

Read `registry` first: what is known of an engine. `local_ranks` takes a rank from its registration to a bound
mover and back; `home` and `member` are the two sides of an engine that spans nodes.
"""
