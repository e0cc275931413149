"""Other autoscalers, each from its published definition: what the planner's own modes are measured against.

A module has the algorithm on plain numbers, as its source states it, and a policy that feeds it from a window.
What a policy asks for passes through the same floors, ceilings and GPU budget as the planner's own modes do.
"""
