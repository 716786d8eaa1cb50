"""What `distserve bench engine` runs: one engine per process, timed step by step."""
