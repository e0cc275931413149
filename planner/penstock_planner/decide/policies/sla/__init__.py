"""Mode ``sla``: mode ``adaptive`` with a performance profile and targets for TTFT and ITL.

What a worker can do is read from the profile (package `capacity`). `limits` divides the GPU budget by what the targets
need.
"""
