"""What binds every policy, one rule or two a module; `pipeline.RULES` has their order."""
