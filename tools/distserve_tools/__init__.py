"""Command line tools: serve, profile, bench, status."""
