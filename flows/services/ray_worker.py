"""A worker of a private Ray cluster: Ray's own, after the imports that its environment asks for.

Ray runs this file as a script, in the place of its `default_worker.py`. An error that ends it before it registers with
Ray is written to a file for `lost_workers`, because Ray itself does not report it.
"""

import os
import sys


def work() -> None:
    import runpy

    import ray

    if "ROLLFLOW_IMPORTS" in os.environ:  # `early_imports.KIND`, which is not imported where nothing is
        from rollflow.tasks.actors.early_imports import import_early

        import_early()
    folder = os.path.join(os.path.dirname(ray.__file__), "_private", "workers")
    sys.path.insert(0, folder)  # as Python has it where this is the script
    runpy.run_path(os.path.join(folder, "default_worker.py"), run_name="__main__")


def write_death(error: Exception) -> None:
    """Write the error as `lost_workers.note_death` does: here, the import of rollflow may be what fails."""
    folder = os.environ.get("ROLLFLOW_LOST_WORKERS")
    if folder:
        os.makedirs(folder, exist_ok=True)
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        with open(os.path.join(folder, str(os.getpid())), "x") as file:
            file.write(f"{os.environ.get('ROLLFLOW_IMPORTS', '')}\n{why}")


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules would hide others of these names
    try:
        work()
    except Exception as failed:
        write_death(failed)
        raise
