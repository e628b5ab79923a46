"""Summaries of scored responses, and estimates of shares of right responses, with confidence intervals."""
