"""What runs on a device: KV cache, model runner, sampler, executor."""
