"""Lease, grant, fence and release over the real core, in every order that small sizes allow."""
