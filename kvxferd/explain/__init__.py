"""`kvxferd explain`: what one engine would read from another, computed without either.

`engine_spec_parser` reads the arguments, `analysis` runs the planner, `advice` tries other layouts, and
`text_report` shows the result.
"""
