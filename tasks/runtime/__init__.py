"""What every other room of `tasks` may import: clock, names, sections, imports. It imports none of them."""
