"""Watches the workload of a running server: has it changed, and is another placement worth a change."""
