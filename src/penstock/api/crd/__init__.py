"""The API as CustomResourceDefinitions, made from the models; no second description of any field.

`python -m penstock.api.crd` writes the files, and `definitions` gives them to who compares them with a
cluster's. Pure but for ``__main__``, which writes the files.

- `schema`: the models' JSON schema as a structural OpenAPI schema, with bounds and rules in CEL;
- `absent_keys`: the rules for objects without their defaults;
- `definition`: names, columns and subresources of each kind.
"""

from penstock.api.crd.definition import definitions, file_name

__all__ = ["definitions", "file_name"]
