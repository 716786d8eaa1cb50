"""Makes a running server be what a placement file says, without losing a request."""
