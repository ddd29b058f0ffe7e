"""The engines here, their ranks and the movers that serve them.

Read `rank` first, the table of a local rank's moves, then `registry`: what is known of an engine.
`local_ranks` takes a rank from its registration to a bound mover and back, which `mover_pool` has forked and
`movers` loads, retires and kills; `session` has what a connection may send, and `home` and `member` are the
two sides of an engine that spans nodes.
"""
