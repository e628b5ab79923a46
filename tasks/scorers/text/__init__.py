"""Verifiers of text: mathematical answers, multiple choice, regular expressions, and constraints that a program can
check.
"""
