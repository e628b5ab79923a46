"""Runs vLLM as an inference engine.

engine              the engine, which starts vLLM's processes and calls them
arguments           builds vLLM's configuration from the config keys of `[engine]`
passed_arguments    decides which arguments of vLLM a recipe may pass on
responses           collects responses from vLLM's core process
worker              loads weights and computes log-probs inside vLLM's processes
drafts              verifies drafted tokens, and drafts from past responses
imports             imports vLLM's core in the process from which core processes are forked
"""
