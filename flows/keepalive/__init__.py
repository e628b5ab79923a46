"""Restarts dead actors, engines, stages, services and supervisors."""
