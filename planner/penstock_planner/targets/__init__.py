"""Where decisions go: the port that a backend implements, and one that only records."""
