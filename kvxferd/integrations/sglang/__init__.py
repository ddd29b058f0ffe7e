"""SGLang's transfer backend: `--disaggregation-transfer-backend kvxferd`, by SGLang's plugin entry point.

Read `transfers` first: the life of a request's cache on either side, as data and without SGLang. `manager`
and `backend` have the four classes that SGLang makes, over it; `hooks` has the places of SGLang that know no
backend and need to: where a pool is allocated, and where pages are given back. `layout` describes the pools,
`held` keeps what an abort gives back too early, `contract` lists every name of SGLang's that is relied on.
docs/how-to/sglang.md says how it is used.
"""
