"""Turns GraphDeployments into Kubernetes objects and keeps them true."""
