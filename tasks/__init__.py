"""Tasks compute: prompts, rollout, engines, rewards, algorithms and learners."""
