"""Where a request goes, when a worker is left alone, and who is next. Pure."""
