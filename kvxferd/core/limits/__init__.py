"""What one user or peer may take of what all share. Read `table` first."""
