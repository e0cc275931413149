"""Pure: the engine without a clock. Paged KV blocks, batching, leases, transfers and latency.

Time is an argument (simulated seconds), so a real-time server and a virtual-time simulator drive the same
body. Nothing here imports a clock, randomness, a socket or asyncio.
"""
