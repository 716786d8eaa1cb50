"""Attention and cache kernels, one function per operation, the implementation chosen once."""
