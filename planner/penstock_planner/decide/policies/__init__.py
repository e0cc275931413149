"""The policies that a planner's mode names: each turns what is observed into one proposed change per role.

`load` is the rule of thresholds on queue and KV usage, `adaptive` follows demand with what it learned of the workers,
and `sla` does so with a performance profile. `baselines` are autoscalers to compare with. `drafting` has the functions
with which a policy that wants a number of replicas makes a proposal. All are found by entry point.
"""
