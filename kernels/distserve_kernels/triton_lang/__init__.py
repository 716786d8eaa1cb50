"""Kernels in the Triton language for NVIDIA GPUs (compute capability 8.0 and up); run on CPU tensors by its interpreter.

`kernels/` holds the device code and nothing else; the modules here check shapes and launch it. Every public function
has a twin in plain torch (`reference`, `ops_reference`, `page_copy`).
"""
