"""Ray as the flows use it: head, workers, access with token and TLS, checks of the nodes."""
