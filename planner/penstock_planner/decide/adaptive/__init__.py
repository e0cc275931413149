"""Mode ``adaptive``: scales on demand at the frontend and on what workers are seen to do; needs no profile.

`policy.adaptive` follows every pull of the interval (`supply`, `work`, `kv`), then proposes one change per role
(`rules`). What it learns lives in `memory` and goes into the recorded state, so replay is bit for bit.
"""
