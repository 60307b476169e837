"""Attention over the KV cache. Import the modules directly; `kernels` chooses among them."""
