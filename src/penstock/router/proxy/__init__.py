"""The OpenAI API in front of the fleet: parsing, KV transfer, relaying, failures, admin endpoints."""
