"""The scorer of programs: `scorer` scores a response, `cases` runs it on test cases, `guest` runs in the sandboxes."""
