"""What dies is started again: actors, engines, stages, services, the supervisor."""
