"""The modules that every other folder of `tasks` may import: clock, names, sections, imports and others.

No module of this folder imports another folder of `tasks`.
"""
