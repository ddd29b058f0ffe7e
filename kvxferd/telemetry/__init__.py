"""Metrics, logs and a short history of one node. Nothing here affects the data path."""
