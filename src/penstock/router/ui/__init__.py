"""The live page of one graph, which its router serves at ``/ui``."""
