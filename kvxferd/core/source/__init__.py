"""What this node offers: transfers that are published, and the grants by which others read them.

Read `publishing` first: a transfer from its publish to its release. `grants` is who may read it now.
"""
