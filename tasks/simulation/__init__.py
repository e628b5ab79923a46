"""Simulates a run: the production scheduler, buffer, weight sync, proxy and channel run on a virtual clock.

Only the parts that take time, such as engines, rewards and the learner, are replaced by models, so results hold for the
production scheduler.

    hardware.py  how long machines take, and how long responses are (one TOML file)
    world.py     one simulation: builds the parts and runs them
    parts.py     timed rewards, the timed learner, faults
    records.py   what a simulation records
    figures.py   the results that are computed from the records
    bounds.py    lower bounds on the step time of every schedule, and upper bounds for asynchronous training
    fit.py       fits a hardware file to a recorded run; calibrate.py fits the speed of its engines
    timeline.py  which parts were busy, and when
    planner.py   the search for a division of the GPUs and a staleness limit; candidates.py defines the search space
"""
