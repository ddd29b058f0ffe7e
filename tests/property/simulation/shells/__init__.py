"""What a shell does that cannot be pure, as models. `test_shell_contracts.py` tries both."""
