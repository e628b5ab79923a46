"""What a cold start needs of the run: its demonstrations, as episodes of its environment."""
