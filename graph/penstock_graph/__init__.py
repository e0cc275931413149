"""The API: a graph's models, rules, loading, import and the processes it becomes.

Pure but for `loading`, which reads files. Imports only `penstock_core`.
"""
