"""Verifiers of text: mathematical answers, multiple choice, patterns, and instructions that can be checked."""
