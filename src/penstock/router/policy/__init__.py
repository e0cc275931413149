"""Pure: where a request goes, when a worker is left alone, how much is retried.

No clock, randomness, socket, event loop or client: time is an argument and the caller owns all state.
"""
