"""Simulations of what one machine is too small for: many engines, many nodes."""
