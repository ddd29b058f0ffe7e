"""Large tensors have mappings of their own, whatever ran before."""

from tests.support.free_heap import no_free_heap

__all__ = ["no_free_heap"]
