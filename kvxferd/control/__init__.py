"""The daemon's sockets: they decode, limit and hand on. Every decision is the core's.

Begin with `worker_socket`, whose sessions' descriptors `session_fds` keeps; `peer_socket`, where `peer_inbox`
decodes what peers send and `connection_guard` limits their connections; and `http_routes`, the table of what
HTTP shows. Who reads next is in `turns`. `effect_runner` performs what the core has decided, and
`core_settings` gives it the configuration.
"""
