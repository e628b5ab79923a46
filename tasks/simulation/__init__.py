"""The simulator: the shipped scheduler, admission, buffer, weight sync, proxy and channel on a virtual clock.

Only what costs time is modelled: engines, rewards, the learner, the pause of an update, faults. No scheduling decision
is written a second time here, so what a simulation says about scheduling holds for the code that runs. It needs no Ray,
torch or disk. The same recipe, hardware and seed give the same figures.

    hardware.py  how long machines take, and how long responses are (one TOML file)
    world.py     one simulation: builds the parts and lets them run
    parts.py     timed rewards, the timed learner, faults
    records.py   what is noted while it runs
    figures.py   the figures that are made of the notes
    bounds.py    what no schedule can pass, and what asynchrony guarantees
    fit.py       a hardware file from what a run recorded; calibrate.py finds its engines
    timeline.py  who was busy when
    planner.py   the search for a split and an alpha; candidates.py is what it looks through
"""
