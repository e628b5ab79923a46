"""Environments of other projects, which run in worker processes; the package `guest` has the code of the processes.

scheduler's event loop: play --> pool --> world --socket of the episode--> episode's process
                                   `----> guest --control socket---------> keeper
"""
