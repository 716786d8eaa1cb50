"""`distserve device-check`: what a device does with this engine, beside what it could do.

Every part runs in a process of its own with a limit of time, so that one that fails, hangs or crashes its
CUDA context costs its own figures and nothing else.
"""
