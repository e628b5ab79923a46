"""Tasks compute: prompts, rollout, engines, verifiers, objectives and learners."""
