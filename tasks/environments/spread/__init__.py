"""Runs the worker processes of environments in hosts: environment actors, which are usually on other nodes.

    episode --> RemoteWorld --line--> link --> WorldHost --> WorldPool --> worker process
                    |                                        (one pool for each environment)
                    `--> HostFleet: the host with the fewest episodes; a lost host is replaced

host    the worker processes of one node
fleet   starts, watches and ends the hosts, and gives each episode a place
world   the environment of one episode on a host; if the host is lost, it continues on another host where possible
pool    limits the episodes of one environment over all hosts
"""
