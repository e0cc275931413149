"""Mode ``sla``: mode ``adaptive`` with a performance profile and targets for TTFT and ITL.

`policy.sla` follows the window's pulls as ``adaptive`` does. What a worker can do it looks up in the profile
(`workers`), corrected by what is observed (`learning`); how busy a pool may be follows from the wait that its requests
may have (`queueing`), how many decode from the ITL that they may see (`answers`).
"""
