"""Open-loop load generator: arrivals never wait for replies."""
