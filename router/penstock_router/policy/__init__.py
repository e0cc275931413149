"""Pure: where a request goes."""
