"""The run's Ray actors: the only folder of `tasks` that imports Ray."""
