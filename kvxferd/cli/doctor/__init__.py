"""`kvxferd doctor`: one file for each thing that is looked at; `verb` runs them all."""
