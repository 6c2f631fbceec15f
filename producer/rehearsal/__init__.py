"""A dry run of a dataset: everything is real but the model server."""
