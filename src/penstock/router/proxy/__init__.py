"""The OpenAI API in front of the fleet: parsing, P/D hand-over, relaying, failures, admin endpoints."""
