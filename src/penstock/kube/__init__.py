"""Access to the Kubernetes API for Penstock's processes; the only package that imports the official client library."""
