"""A model server without a model: vLLM's and SGLang's wire protocols, for dry runs and for tests."""
