"""The engine process: one loop around scheduler, executor and KV transfer."""
