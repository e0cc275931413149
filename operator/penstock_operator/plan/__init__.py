"""Pure functions that decide what a reconcile does: drift, GPU budget, drains, rollouts, deletion and status."""
