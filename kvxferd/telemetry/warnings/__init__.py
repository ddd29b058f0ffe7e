"""What an operator should fix although the node works: found by the daemon itself, and logged once.

A warning is a state that the daemon knows exactly, and needs no Prometheus. Rates, shares and limits are for
alerts and for the verdict of `kvxferd status`. A warning does not make a node unready: its pulls from other
peers still work. `kinds.py` has them; `warning_list.py` decides when one begins and ends.
"""
