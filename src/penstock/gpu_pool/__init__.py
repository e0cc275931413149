"""GPU pools: which graph may hold how many of the GPUs that several graphs share. Pure."""
