"""A vLLM-like engine: a pure core, latency profiles and a real-time server."""
