"""The attacks, a file for each family."""
