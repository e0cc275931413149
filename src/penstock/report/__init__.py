"""Report: what a load run measured and what the planner did about it, as text, pictures and one page.

Reads results (`penstock.workload`) and the planner's ledger (`penstock_planner`). `analysis` and
`series` are pure; pictures need the extra ``plots``.
"""
