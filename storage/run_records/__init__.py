"""Stores the records of a run that are not in its log, such as recoveries, weight updates, CPU seconds and stop
requests.
"""
