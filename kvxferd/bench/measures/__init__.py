"""The measures of the bench, one a file. Each yields its points and figures, and texts on its progress."""
