"""Contains the modules that every other folder of `tasks` may import, such as clock, names, sections and imports.

No module of this folder imports another folder of `tasks`.
"""
