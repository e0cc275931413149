"""Mode ``adaptive``: scales on demand at the frontend and on the observed throughput of workers. It needs no profile.

`policy` updates the learned state (`memory`) with each pull of the interval, then proposes one change per role
(`rules`). `look_back` learns from the interval which number of replicas would have been best, `retention` explains why
a replica that demand does not need is kept, and `scale_to_zero` takes all roles to zero. The learned state is part of
the recorded planner state, so that replay gives the same result bit for bit.
"""
