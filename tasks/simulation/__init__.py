"""The simulator: the shipped scheduler, admission, buffer, controller, proxy and channel on a virtual clock.

Only what costs time is modelled: engines, rewards, the learner, the pause of an update, faults. No policy is written a
second time here, so what a simulation says of scheduling is said of the code that runs. Needs no Ray, torch or disk,
and the same recipe, hardware and seed give the same figures.

    hardware.py  what machines take for things, and how long responses are (one TOML file)
    world.py     one simulation: builds the parts and lets them run
    parts.py     timed rewards, the timed learner, faults
    records.py   what is noted while it runs
    figures.py   what is made of the notes
    bounds.py    what no schedule can pass, and what asynchrony guarantees
    fit.py       a hardware file from what a run recorded; calibrate.py finds its engines
    timeline.py  who was busy when
    planner.py   the search for a split and an alpha; candidates.py is what it looks through
"""
