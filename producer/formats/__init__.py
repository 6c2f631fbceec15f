"""Readers of rows, one file per file format."""
