"""Other autoscalers, each implemented from its published definition, with which the planner's own modes are compared.

Each module has the algorithm on plain numbers, as its source defines it, and a policy that reads these numbers from a
window. A policy's proposal passes through the same minimum, maximum and GPU budget as those of the planner's own
modes.
"""
