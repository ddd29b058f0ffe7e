"""The checks of `kvxferd doctor`, one module each; `kvxferd.cli.doctor` names and runs them."""
