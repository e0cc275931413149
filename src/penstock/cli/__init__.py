"""The `penstock` command: parse, load configuration, call; nothing else."""
