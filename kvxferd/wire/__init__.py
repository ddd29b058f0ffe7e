"""The messages, frames and limits of the three protocols: worker, peer and mover. No I/O."""
