"""The simulated worker in real time: vLLM's HTTP API over the pure core."""
