"""The Kubernetes API as Penstock's processes use it; the only package that imports the client library."""
