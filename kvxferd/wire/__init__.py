"""The three protocols: messages, frames and their limits. No I/O."""
