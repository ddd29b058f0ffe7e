"""`kvxferd explain`: what one engine would read from another, computed without either.

`engine_spec_parser` reads the arguments, `analysis` runs the planner, and `text_report`, `json_report` and
`svg_report` show the result.
"""
