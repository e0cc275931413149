"""Text of Kubernetes objects: labels, names, reasons and the keys of pod templates that several parts read alike.

Pure: no client, no I/O but the packaged table of pod keys. Imports nothing of Penstock.
"""
