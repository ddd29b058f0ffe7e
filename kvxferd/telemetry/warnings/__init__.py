"""What an operator should fix although the node works: found by the daemon itself, and logged once.

It needs no Prometheus, and sees what is no series: the speed from each peer, a mover's wait for a
processor. A warning does not make a node unready: its pulls to other peers still work.
"""
