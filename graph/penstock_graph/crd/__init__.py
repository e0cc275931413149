"""The API as CustomResourceDefinitions, made from the models; no second description of any field.

`python -m penstock_graph.crd` writes the files, and `definitions` gives them to who compares them with a
cluster's. Pure but for ``__main__``.

- `schema`: the models' JSON schema as a structural OpenAPI schema, with defaults and bounds;
- `rules` and `graph_rules`: the cross-field rules of the models in CEL;
- `definition`: names, columns and subresources of each kind.
"""

from penstock_graph.crd.definition import definitions, file_name
from penstock_graph.crd.rule import Rule
from penstock_graph.crd.rules import RULES

__all__ = ["RULES", "Rule", "definitions", "file_name"]
