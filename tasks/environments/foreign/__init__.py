"""Runs environments of other projects in worker processes. The package `guest` contains the code of these processes.

scheduler's event loop: play --> pool --> world --socket of the episode--> episode's process
                                   `----> guest --control socket---------> keeper
"""
