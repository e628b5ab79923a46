"""Restarts what dies: actors, engines, stages, services and the supervisor."""
