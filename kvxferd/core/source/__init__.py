"""What this node offers: transfers that are published, and the grants by which others read them.

Read `publishing` first: a transfer from its publish to its release, with the table of its states. `grants` is
who may read it now, and `waiting` keeps the requests that have no reply yet.
"""
