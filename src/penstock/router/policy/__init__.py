"""Routing policies, the order of waiting requests, busy workers, and tiers: which request goes to which worker, and when. Pure."""
