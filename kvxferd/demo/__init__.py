"""`kvxferd demo`: two daemons, two engines of real processes, and a check of every byte that moved."""
