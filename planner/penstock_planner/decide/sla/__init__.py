"""Mode ``sla``: mode ``adaptive`` with a performance profile and targets for TTFT and ITL.

A worker's throughput is looked up in the profile (`workers`) and corrected by observations (`learning`). The maximum
utilisation of a pool follows from the wait that its requests can have (`queueing`).
"""
