"""The messages, frames and limits of the three protocols: worker, peer and mover. No I/O.

`worker`, `peer` and `mover` have the messages, each with the order in which they come; `common` what they
share, `codec` their decoders, `framing` the frames of Unix sockets, and `limits` every size with its reason.
"""
