"""Serves sandboxes over HTTP: `run_code` runs the requests, `app` receives them, `serve` opens the port."""
