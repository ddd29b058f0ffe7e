"""The measures of the bench, one a file."""
