"""Sub-commands of `planner`, one module each with `add_arguments(parser)` and `run(args) -> int`."""
