"""Mode ``adaptive``: scales on demand at the frontend and on the observed throughput of workers. It needs no profile.

`by_demand` updates the learned state with each pull of the interval (`memory`, and `load` and the forecasts of package `demand`), then proposes one change
per role (`rules`). The learned state is part of the recorded planner state, so that replay gives the same result bit
for bit.
"""
