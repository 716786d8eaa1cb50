"""KV cache movement between a prefill and a decode instance."""
