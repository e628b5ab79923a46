"""Shows what the environment of a stored episode rendered: the episode is replayed, and its frames are texts or
pictures."""
