"""A run as all of its processes see it: config, context, pinned prompts, user code."""
