"""Pure Python: requests, blocks, schedulers, configuration. Never imports torch."""
