"""From prompts to committed batches: scheduler, admission, proxy, weight sync."""
