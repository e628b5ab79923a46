"""Contains modules that every other folder of `tasks` may import, such as the clock, config sections and imports.

No module of this package imports another folder of `tasks`.
"""
