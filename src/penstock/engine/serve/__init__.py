"""The simulated worker in real time: serves vLLM's HTTP API with the pure engine core."""
