"""The endpoint picker of a Gateway: Envoy relays requests, Penstock chooses their workers."""
