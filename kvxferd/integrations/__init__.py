"""Connectors that run inside inference engines: the only part of kvxferd that may import one."""
