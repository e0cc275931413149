"""Mode ``sla``: mode ``adaptive`` with a performance profile and targets for TTFT and ITL.

What a worker can do is looked up in the profile (`workers`), corrected by what is observed (`learning`); how busy a pool may
be follows from the wait that its requests may have (`queueing`).
"""
