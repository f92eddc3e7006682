"""Object stores that run on loopback for a session of tests: one module a server."""
