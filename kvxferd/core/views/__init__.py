"""What status and history show of a node."""
