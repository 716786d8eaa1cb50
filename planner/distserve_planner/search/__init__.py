"""The search for a placement: Algorithms 1 and 2 of the paper, colocated baselines, bounds, validation."""
