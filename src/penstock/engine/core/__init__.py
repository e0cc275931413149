"""Pure: the engine without a clock; time is an argument, so that a server and a simulator drive the same body."""
