"""GPU pools: decides how many of the GPUs that several graphs share each graph can hold. Pure."""
