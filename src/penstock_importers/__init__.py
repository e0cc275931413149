"""Conversion of other stacks' manifests and Helm values: production-stack, llm-d's modelservice, KServe. Pure."""
