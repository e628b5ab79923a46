"""Estimates of shares of right responses, with their intervals."""
