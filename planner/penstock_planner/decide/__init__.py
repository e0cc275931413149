"""Pure: how many replicas there should be."""
