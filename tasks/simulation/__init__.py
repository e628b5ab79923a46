"""Simulates a run: the production scheduler, buffer, weight sync, proxy and channel run on a virtual clock.

Only the parts that take time, such as engines, rewards and the learner, are replaced by models, so results hold for the
production scheduler.

    hardware.py  how long machines take, and how long responses are (one TOML file)
    world.py     one simulation: builds the parts and runs them
    parts.py     timed rewards, the timed learner, faults
    records.py   what a simulation records
    figures.py   the figures computed from the records
    bounds.py    bounds that no schedule can exceed, and what asynchrony guarantees
    fit.py       a hardware file from a recorded run; calibrate.py fits its engines
    timeline.py  which parts were busy, and when
    planner.py   the search for a split and an alpha; candidates.py defines the search space
"""
