"""Columns shapes, one small file per shape: a source row in, a conversation in OpenAI's form out."""
