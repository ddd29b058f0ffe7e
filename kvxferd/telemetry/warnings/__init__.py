"""What an operator should fix although the node works: found by the daemon itself, and logged once."""
