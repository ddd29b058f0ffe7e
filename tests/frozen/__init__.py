"""The surfaces that others depend on, recorded: each compared with the code by `test_frozen.py`.

`recorded/NAME.json` is what `surfaces.SURFACES[NAME]` returned when it was recorded last. After an intended
change:  .venv/bin/python -m tests.frozen [NAME...]
"""
