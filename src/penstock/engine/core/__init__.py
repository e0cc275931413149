"""The simulated engine without a clock. Pure: the time is an argument, so that a real-time server and a simulator run the same code."""
