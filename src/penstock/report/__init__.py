"""Report on a load run and on the planner's decisions during it, as text, charts and one HTML page.

It reads the results of `penstock.workload` and the ledger of `penstock_planner`. `analysis` and `series` are pure; charts need the extra
``plots``.
"""
