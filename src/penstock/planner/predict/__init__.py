"""Predictors of demand that a library fits, outside of the decision.

`history` gathers arrivals, `fit` is one fit of them, `models` calls the libraries, `forecasts` runs fits at once (simulator)
or in a thread (live). What comes out goes with a pull into the window and the ledger, so that replay needs no library.
"""
