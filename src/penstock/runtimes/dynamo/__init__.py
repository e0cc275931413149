"""Runtime ``dynamo``: its processes (`runtime`), and the import of its own manifests (`importer`). Pure."""
