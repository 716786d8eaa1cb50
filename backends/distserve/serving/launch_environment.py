"""Environment variables in which the launcher of a server tells its models what their files can't say."""

from __future__ import annotations

ACCESS_SECRET = "DISTSERVE_ACCESS_SECRET"
"""Hexadecimal; see `distserve.serving.access`."""

SERVER_RESTARTS = "DISTSERVE_SERVER_RESTARTS"
"""How often the server had to be started again."""
