"""Serves sandboxes over HTTP: the module `serve` opens the port, `app` receives requests, and `run_code` and `rock`
execute them.
"""
