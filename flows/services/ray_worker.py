"""A worker of a private Ray cluster: Ray's own, after the imports that its environment asks for.

Ray runs this file as a script, in the place of its `default_worker.py`.
"""

import os
import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules are others by these names
    import runpy

    import ray

    if "ROLLFLOW_IMPORTS" in os.environ:  # `early_imports.KIND`, which is not imported where nothing is
        from rollflow.tasks.actors.early_imports import import_early

        import_early()
    folder = os.path.join(os.path.dirname(ray.__file__), "_private", "workers")
    sys.path.insert(0, folder)  # as Python has it where this is the script
    runpy.run_path(os.path.join(folder, "default_worker.py"), run_name="__main__")
