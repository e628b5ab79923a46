"""The policy's architecture and its cold start."""
