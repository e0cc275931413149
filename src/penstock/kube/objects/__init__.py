"""Constants and parsers for Kubernetes objects that several packages share: labels, names, reasons, and pod template fields.

Pure: no client and no I/O except reading the packaged table of pod fields. Imports no other Penstock package.
"""
