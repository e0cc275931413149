"""What is known about demand: the observations of one metrics scrape, the load followed over many, and forecasts from them.

`reading` and `observation` hold what a scrape returned. `load` averages prefill work and KV usage. Demand at a later
time is forecast from its trend (`trend`), from earlier days and weeks (`week`), and from the period with which it
returns (`recurrence`). Nothing in this package knows what a worker can do, or what a policy makes of the demand.
"""
