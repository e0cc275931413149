"""Rules that bind every policy's proposal, one or two rules per module. `pipeline.RULES` has their order."""
