"""Kernels in the Triton language, for NVIDIA GPUs of compute capability 8.0 and up.

`kernels/` holds the device code and nothing else; the modules here check shapes and launch it. Every public
function has a twin in plain torch (`reference`, `ops_reference`, `page_copy`).
CPU tensors they take in Triton's interpreter, if TRITON_INTERPRET=1 was set before Triton was first imported.
"""
