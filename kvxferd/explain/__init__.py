"""`kvxferd explain`: what would happen between two engines, computed without either."""
