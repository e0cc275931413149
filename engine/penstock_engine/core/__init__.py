"""Pure: the engine without a clock."""
