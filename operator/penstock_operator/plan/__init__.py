"""Pure: drift, permission to start, drains, and the status."""
