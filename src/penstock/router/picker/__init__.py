"""Elects one router of a graph as the picker, which chooses the workers for all routers' requests."""
