"""Device code. Only modules of `triton_lang` launch it.

All kernels do their arithmetic in fp32 and convert on loads and stores: the interpreter knows bf16 only as
a storage format. Offsets into pages are 64-bit, since a pool may have more than 2^31 elements.
"""
