"""OpenAI-compatible HTTP front end, a process of its own in front of Triton's gRPC endpoint."""
