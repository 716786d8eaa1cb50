"""Event-driven simulation of a deployment: the engine's schedulers under another clock."""
