"""Fault injection: breaks parts of a running deployment and counts what became of the requests."""
