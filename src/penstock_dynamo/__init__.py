"""NVIDIA Dynamo under Penstock: runtime, frontend of a local graph, metric source, importer. Reached by entry points alone.

What it needs of Penstock a runtime of any other distribution has too: docs/runtimes.md.
"""
