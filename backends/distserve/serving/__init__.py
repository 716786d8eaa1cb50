"""Triton code only: message schema, instance model, orchestrator, supervisor."""
