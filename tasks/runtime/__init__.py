"""Contains modules that every other folder of `tasks` may import, such as the clock, config sections and imports.

No module here imports another folder of `tasks`.
"""
