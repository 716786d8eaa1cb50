"""A load whose mix turns, on a running server with and without `planner watch`."""
