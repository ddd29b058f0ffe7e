"""`python -m kvxferd.cli`: the same as the `kvxferd` script."""

from kvxferd.cli import main

main()
