"""A rank's layout from vLLM's cache config: what each layer's cache is, and where its bytes lie.

`support` names the classes of vLLM that are known, `specs` reads vLLM's objects into plain `facts`, and
`derivation` makes the layout of them; read it first. `attention`, `cpu_attention` and `states` describe one
layer's cache each, and `opaque` one whose content is not known. `groups` selects a request's blocks. Neither
vLLM nor torch is imported at module level, so all of it is tested without them.
"""
