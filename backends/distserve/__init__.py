"""Disaggregated LLM serving: scheduler, models, workers, KV transfer and the Triton models around them."""
